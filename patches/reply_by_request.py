"""Seam "reply shape" of speculators 0.4, which expects the layers of each request by its id."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._names import CONSUMER_04, FETCH, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def by_request_executor(original: type) -> type:
    class ByRequestExecutor(original):  # type: ignore[valid-type, misc]
        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            return self._by_request(reply) if method == FETCH else reply

        def _by_request(self, layers: list[Any]) -> dict[str, list[Any]]:
            """Cut ``[tokens, hidden]`` per layer, rows in the order of submission, into the rows of each request."""
            lengths = [count for _, count in self.call_requests]
            cut = [rows.split(lengths) for rows in layers]
            return {request_id: list(rows) for (request_id, _), *rows in zip(self.call_requests, *cut, strict=True)}

    return ByRequestExecutor


PATCH = Patch(
    id="reply-by-request",
    ranges={"speculators": CONSUMER_04, "vllm": ">=0.12.0"},
    after=("hand-over", "reply-shape"),
    needs=("capture",),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=by_request_executor),),
    shapes=(
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.collective_rpc",
            parameters=("unique_reply_rank",),
        ),
    ),
    symptom="AttributeError: 'list' object has no attribute 'keys'; without our capture: rows of requests exchanged",
    cause=(
        "speculators 0.4 labels rows by their place in the runner's batch after the step, where finished requests have "
        "already moved others (custom_worker.py)"
    ),
    does="Answers _get_captured_states with the rows of each request, labelled while its step ran.",
    retires=RETIRES,
    evidence="reply-by-request",
)
