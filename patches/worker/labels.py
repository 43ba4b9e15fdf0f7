"""Which rows of a step belong to which request: the model runner's own view of its batch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Label(NamedTuple):
    """``count`` rows of one request in the order of the batch, beginning at ``position`` of its prompt."""

    request_id: str
    position: int
    count: int


def check_runner(runner: Any) -> None:
    """Raises ValueError: the batch of this model runner is not one that ``step_labels`` understands."""
    batch = getattr(runner, "input_batch", None)
    if batch is None or not hasattr(batch, "req_ids") or not hasattr(batch, "num_computed_tokens_cpu"):
        raise ValueError(
            f"vllm_compat: model runner {type(runner).__module__}.{type(runner).__name__} has no input_batch with "
            "req_ids; its order of rows is unknown. If this is Model Runner V2, set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def step_labels(runner: Any, scheduler_output: Any) -> list[Label]:
    """Labels of the step that ``runner.execute_model`` has just run (before ``sample_tokens``).

    The order is the runner's: it may differ from the scheduler's, because new requests take the slots of finished ones
    and attention backends reorder. The position is checked against what the scheduler sent.

    Raises:
        RuntimeError: the two disagree.
    """
    batch = runner.input_batch
    scheduled = scheduler_output.num_scheduled_tokens
    ids = list(batch.req_ids[: batch.num_reqs])
    if set(ids) != set(scheduled):
        raise RuntimeError(f"vllm_compat: the batch holds {sorted(ids)}, the scheduler sent {sorted(scheduled)}")
    labels = [
        Label(request_id, int(batch.num_computed_tokens_cpu[index]), scheduled[request_id])
        for index, request_id in enumerate(ids)
    ]
    sent = _positions_sent(scheduler_output)
    for label in labels:
        if label.position != sent[label.request_id]:
            raise RuntimeError(
                f"vllm_compat: request {label.request_id}: the model runner is at token {label.position}, the "
                f"scheduler sent token {sent[label.request_id]}"
            )
    return labels


def _positions_sent(scheduler_output: Any) -> dict[str, int]:
    sent = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    return sent | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
