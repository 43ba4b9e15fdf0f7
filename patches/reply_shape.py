"""Seam "reply shape": the consumer takes element 0 of a reply that is no longer a list of one."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._names import CONSUMER_03, FETCH, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def list_of_one_reply(reply: Any) -> list[Any]:
    """``[layers]`` from either form; ``layers`` is a list of one tensor ``[tokens, hidden]`` per layer, or None."""
    if isinstance(reply, list) and len(reply) == 1 and (reply[0] is None or isinstance(reply[0], list)):
        return reply
    return [reply]


def list_reply_executor(original: type) -> type:
    class ListReplyExecutor(original):  # type: ignore[valid-type, misc]
        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            # Only the consumer's own call: vLLM's execute_model goes through here too and wants the bare value.
            return list_of_one_reply(reply) if method == FETCH else reply

    return ListReplyExecutor


PATCH = Patch(
    id="reply-shape",
    ranges={"speculators": CONSUMER_03, "vllm": ">=0.11.1"},
    after=("two-phase-execution", "hand-over"),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=list_reply_executor),),
    shapes=(
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.collective_rpc",
            parameters=("unique_reply_rank",),
        ),
    ),
    symptom=(
        "RuntimeError: Boolean value of Tensor with more than one value is ambiguous; where the test is changed to "
        "`is None` instead: one row per 'layer', garbage without an error"
    ),
    cause=(
        "vLLM 0.11.1: collective_rpc(unique_reply_rank=...) answers the bare value, not a list of one "
        "(vllm/v1/executor/multiproc_executor.py)"
    ),
    does="Answers the consumer's _get_captured_states with a list of one again.",
    retires=RETIRES,
    evidence="reply-shape",
)
