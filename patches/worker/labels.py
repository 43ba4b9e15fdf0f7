"""Which rows of a step belong to which request: the model runner's own view of its batch.

vLLM has two model runners. V1 (``vllm/v1/worker/gpu_model_runner.py``) keeps one ``input_batch`` for all steps. V2
(``vllm/v1/worker/gpu/model_runner.py``, the default of more and more models from vLLM 0.22 on, the only one from 0.34
on) makes a batch for each step, sorted by the number of tokens: what ``prepare_inputs`` returns just before the forward
pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Label(NamedTuple):
    """``count`` rows of one request in the order of the batch, beginning at ``position`` of its prompt."""

    request_id: str
    position: int
    count: int


_V1 = "If this is Model Runner V2 of a vLLM before 0.34, set VLLM_USE_V2_MODEL_RUNNER=0."
V2_BATCH = ("req_ids", "query_start_loc_np", "positions")
_REPORT = "This is no fault of your data: please report it with `vllm-compat doctor --json`."


def class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def check_runner(runner: Any) -> None:
    """Raises ValueError: the batch of this model runner is not one that ``step_labels`` understands."""
    if not _is_v1(runner) and not _is_v2(runner):
        raise ValueError(
            f"vllm_compat: model runner {class_name(runner)} has no input_batch with req_ids, and "
            f"no prepare_inputs that makes one we know; its order of rows is unknown. {_V1}"
        )


def _is_v1(runner: Any) -> bool:
    batch = getattr(runner, "input_batch", None)
    return hasattr(batch, "req_ids") and hasattr(batch, "num_computed_tokens_cpu")


def _is_v2(runner: Any) -> bool:
    """It has no batch between steps, so the classes beside the runner's must tell; those before 0.18 are not known."""
    if not hasattr(runner, "prepare_inputs"):
        return False
    for module in (sys.modules[each.__module__] for each in type(runner).__mro__):
        if "input_batch" in getattr(getattr(module, "ExecuteModelState", None), "_fields", ()):
            fields = getattr(getattr(module, "InputBatch", None), "__dataclass_fields__", ())
            return all(name in fields for name in V2_BATCH)
    return False


def watch_batches(runner: Any, seen: Callable[[Any], None]) -> None:
    """Call ``seen`` with each batch that V2 makes (this instance only); V1's is in reach without."""
    if _is_v1(runner):
        return
    prepare = runner.prepare_inputs

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        seen(batch)
        return batch

    runner.prepare_inputs = prepare_inputs


def step_labels(runner: Any, scheduler_output: Any, batch: Any = None) -> list[Label]:
    """Labels of the step whose forward pass ``runner.execute_model`` is running.

    The order is the runner's: it may differ from the scheduler's, because new requests take the slots of finished ones,
    attention backends reorder, and V2 sorts. Counts are checked against what the scheduler sent, and V1's positions.
    V2 has its own on the device only, where asking for them now would wait for it: the positions here are the
    scheduler's, and ``batch.positions``, which vLLM made of its own books, are for the caller to compare.

    Args:
        batch: what V2 made for this step.

    Raises:
        RuntimeError: the two disagree, or V2 ran the model without making a batch.
    """
    scheduled, sent = scheduler_output.num_scheduled_tokens, _positions_sent(scheduler_output)
    if _is_v1(runner):
        labels = _v1_labels(runner.input_batch, scheduled)
    elif batch is not None:
        labels = _v2_labels(batch, sent)
    else:
        raise RuntimeError(
            f"vllm_compat: {class_name(runner)} ran the model without prepare_inputs; the order of its rows is unknown"
            f". {_V1}"
        )
    ids = sorted(label.request_id for label in labels)
    if ids != sorted(scheduled):
        raise RuntimeError(f"vllm_compat: the batch holds {ids}, the scheduler sent {sorted(scheduled)}. {_REPORT}")
    for name, position, count in labels:
        if position != sent[name] or count != scheduled[name]:
            raise RuntimeError(
                f"vllm_compat: request {name}: the model runner is at token {position} and computed {count}, the "
                f"scheduler sent token {sent[name]} and {scheduled[name]} to compute. {_REPORT}"
            )
    return labels


def _v1_labels(batch: Any, scheduled: dict[str, int]) -> list[Label]:
    return [
        Label(request_id, int(batch.num_computed_tokens_cpu[index]), scheduled.get(request_id, 0))
        for index, request_id in enumerate(batch.req_ids[: batch.num_reqs])
    ]


def _v2_labels(batch: Any, sent: dict[str, int]) -> list[Label]:
    """Behind the rows of the last request there may be padding."""
    starts = batch.query_start_loc_np[: len(batch.req_ids) + 1].tolist()
    return [
        Label(request_id, sent.get(request_id, 0), end - start)
        for request_id, start, end in zip(batch.req_ids, starts, starts[1:], strict=False)
    ]


def _positions_sent(scheduler_output: Any) -> dict[str, int]:
    sent = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    return sent | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
