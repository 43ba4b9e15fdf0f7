"""Which rows of a step belong to which request: the model runner's own view of its batch.

vLLM has two model runners. V1 (``vllm/v1/worker/gpu_model_runner.py``) keeps one ``input_batch`` for all steps. V2
(``vllm/v1/worker/gpu/model_runner.py``, the default of more and more models from vLLM 0.22 on) makes a batch for each
step, sorted by the number of tokens, and keeps it in ``execute_model_state`` until ``sample_tokens``.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Label(NamedTuple):
    """``count`` rows of one request in the order of the batch, beginning at ``position`` of its prompt."""

    request_id: str
    position: int
    count: int


V2_BATCH = ("req_ids", "query_start_loc_np", "positions")


def check_runner(runner: Any) -> None:
    """Raises ValueError: the batch of this model runner is not one that ``step_labels`` understands."""
    if not _is_v1(runner) and not _is_v2(runner):
        raise ValueError(
            f"vllm_compat: model runner {type(runner).__module__}.{type(runner).__name__} has no input_batch with "
            "req_ids, and no execute_model_state that holds one; its order of rows is unknown. If this is Model Runner "
            "V2, set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def _is_v1(runner: Any) -> bool:
    batch = getattr(runner, "input_batch", None)
    return hasattr(batch, "req_ids") and hasattr(batch, "num_computed_tokens_cpu")


def _is_v2(runner: Any) -> bool:
    """Its state is empty between steps, so the classes beside the runner's must tell."""
    for module in (sys.modules[each.__module__] for each in type(runner).__mro__):
        if "input_batch" in getattr(getattr(module, "ExecuteModelState", None), "_fields", ()):
            fields = getattr(getattr(module, "InputBatch", None), "__dataclass_fields__", ())
            return all(name in fields for name in V2_BATCH)
    return False


def known_during_forward(runner: Any) -> bool:
    """Whether ``step_labels`` can tell while the model runs: V1 makes its batch before, V2 shows it after."""
    return _is_v1(runner)


def step_labels(runner: Any, scheduler_output: Any) -> list[Label]:
    """Labels of the step that ``runner.execute_model`` has just run (before ``sample_tokens``), or, where they are
    ``known_during_forward``, is running.

    The order is the runner's: it may differ from the scheduler's, because new requests take the slots of finished ones,
    attention backends reorder, and V2 sorts. The position is checked against what the scheduler sent.

    Raises:
        RuntimeError: the two disagree.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    labels = _v1_labels(runner.input_batch, scheduled) if _is_v1(runner) else _v2_labels(runner.execute_model_state)
    ids = sorted(label.request_id for label in labels)
    if ids != sorted(scheduled):
        raise RuntimeError(f"vllm_compat: the batch holds {ids}, the scheduler sent {sorted(scheduled)}")
    sent = _positions_sent(scheduler_output)
    for name, position, count in labels:
        if position != sent[name] or count != scheduled[name]:
            raise RuntimeError(
                f"vllm_compat: request {name}: the model runner is at token {position} and computed {count}, the "
                f"scheduler sent token {sent[name]} and {scheduled[name]} to compute"
            )
    return labels


def _v1_labels(batch: Any, scheduled: dict[str, int]) -> list[Label]:
    return [
        Label(request_id, int(batch.num_computed_tokens_cpu[index]), scheduled.get(request_id, 0))
        for index, request_id in enumerate(batch.req_ids[: batch.num_reqs])
    ]


def _v2_labels(state: Any) -> list[Label]:
    """``positions`` is what the model's forward was given, on the device; the batch's other counts are the scheduler's.

    Behind the rows of the last request there may be padding.
    """
    batch = state.input_batch
    starts = batch.query_start_loc_np[: len(batch.req_ids) + 1].tolist()
    positions = batch.positions[starts[:-1]].tolist()
    return [
        Label(request_id, position, end - start)
        for request_id, position, start, end in zip(batch.req_ids, positions, starts, starts[1:], strict=False)
    ]


def _positions_sent(scheduler_output: Any) -> dict[str, int]:
    sent = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    return sent | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
