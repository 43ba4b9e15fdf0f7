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


def hashing_scheduler(original: type) -> type:
    class HashingScheduler(original):  # type: ignore[valid-type, misc]
        def __init__(self, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> None:
            # As ``EngineCore``: the workers have chosen their blocks, their sizes are settled before the scheduler.
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            cached = [spec for spec in specs if getattr(spec, "prefix_cacheable", True)]
            if specs:
                vllm_config.cache_config.block_size = min(spec.block_size for spec in cached or specs)
            vllm_config.validate_block_size()
            block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            sizes = {"block_size": block_size, "hash_block_size": hash_block_size}
            super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **sizes, **kwargs)
            self.hash_block_size = hash_block_size

    return HashingScheduler


PATCH = Patch(
    id="scheduler-construction",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.1,<0.20"},
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

HASHING_PATCH = Patch(
    id="scheduler-block-sizes",
    ranges={"speculators": CONSUMER, "vllm": ">=0.20.0"},
    after=("call-boundary", "scheduler-construction"),
    targets=(Rebind(module=GENERATOR, name="Scheduler", make=hashing_scheduler),),
    shapes=(
        Shape(
            module="vllm.v1.core.sched.scheduler",
            symbol="Scheduler.__init__",
            parameters=("vllm_config", "kv_cache_config", "structured_output_manager", "block_size", "hash_block_size"),
        ),
        Shape(
            module="vllm.v1.core.kv_cache_utils",
            symbol="resolve_kv_cache_block_sizes",
            parameters=("kv_cache_config", "vllm_config"),
        ),
        Shape(module="vllm.config.vllm", symbol="VllmConfig.validate_block_size"),
    ),
    symptom="TypeError: Scheduler.__init__() missing 1 required positional argument: 'block_size'",
    cause="vLLM 0.20 lets its engine resolve the sizes of blocks and of their hashes (vllm/v1/core/kv_cache_utils.py)",
    does="Resolves both sizes from the cache that the workers have, as vLLM's engine does, and passes them.",
    retires=RETIRES,
    evidence="scheduler-block-sizes",
)
