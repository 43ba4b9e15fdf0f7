"""Seam "scheduler construction": arguments that newer schedulers require."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def sized_scheduler(original: type) -> type:
    class SizedScheduler(original):  # type: ignore[valid-type, misc]
        def __init__(self, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> None:
            # As vLLM's engine: the smallest group's block, times the context-parallel sizes (1 here).
            parallel = vllm_config.parallel_config
            blocks = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            block_size = min(blocks, default=vllm_config.cache_config.block_size)
            block_size *= parallel.decode_context_parallel_size
            block_size *= getattr(parallel, "prefill_context_parallel_size", 1)
            kwargs["block_size"] = block_size
            super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)

    return SizedScheduler


PATCH = Patch(
    id="scheduler-construction",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.1"},
    after=("call-boundary",),
    targets=(Rebind(module=GENERATOR, name="Scheduler", make=sized_scheduler),),
    shapes=(
        Shape(
            module="vllm.v1.core.sched.scheduler",
            symbol="Scheduler.__init__",
            parameters=("vllm_config", "kv_cache_config", "structured_output_manager", "block_size"),
        ),
    ),
    symptom="TypeError: Scheduler.__init__() missing 1 required positional argument: 'block_size'",
    cause="vLLM 0.11.1 takes the block size from its engine (vllm/v1/core/sched/scheduler.py)",
    does="Passes the block size that vLLM's engine would pass.",
    retires=RETIRES,
    evidence="scheduler-construction",
)
