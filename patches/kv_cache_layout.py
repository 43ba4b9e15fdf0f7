"""Seam "KV-cache planning" of releases that lay the cache out in an order that is to be resolved first."""

from __future__ import annotations

import inspect
from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def layout_executor(original: type) -> type:
    class LayoutExecutor(original):  # type: ignore[valid-type, misc]
        def plan_kv_cache(self, vllm_config: Any, specs: list[dict[str, Any]], memory: int) -> list[Any]:
            """As ``EngineCore._initialize_kv_caches``: one layout for all workers, before anything is planned."""
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

            every_spec = [spec for worker in specs for spec in worker.values()]
            layout = resolve_kv_cache_layout(vllm_config, self.get_supported_kv_cache_layouts(), every_spec)
            self.set_kv_cache_layout(layout.name, **self._context_parallel(vllm_config))
            configs: list[Any] = super().plan_kv_cache(vllm_config, specs, memory)
            for config in configs:
                config.kv_cache_layout = layout.name
            return configs

        def _context_parallel(self, vllm_config: Any) -> dict[str, int]:
            """vLLM 0.33 sends the workers the interleave of context parallelism, too."""
            name = "cp_kv_cache_interleave_size"
            known = inspect.signature(super().set_kv_cache_layout).parameters
            return {name: getattr(vllm_config.parallel_config, name)} if name in known else {}

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            self._tell_block_hashes(kv_cache_configs)
            super().initialize_from_config(kv_cache_configs)

        def _tell_block_hashes(self, configs: list[Any]) -> None:
            """vLLM 0.32 tells its workers the grain of block hashes and cache hits (Mamba's checkpoints read it)."""
            if not hasattr(configs[0], "cache_hit_alignment_tokens"):
                return
            from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes

            config = current_generator().vllm_config
            block_size, hash_block_size = resolve_kv_cache_block_sizes(configs[0], config)
            alignment = resolve_cache_hit_alignment_tokens(configs[0], config, block_size, hash_block_size)
            for each in configs:
                each.hash_block_size = hash_block_size
                each.cache_hit_alignment_tokens = alignment

    return LayoutExecutor


PATCH = Patch(
    id="kv-cache-layout",
    ranges={"speculators": CONSUMER, "vllm": ">=0.29.0"},
    after=("kv-cache-planning", "kv-cache-planning-moved"),
    needs=("call-boundary",),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=layout_executor),),
    shapes=(
        Shape(
            module="vllm.v1.attention.backends.utils",
            symbol="resolve_kv_cache_layout",
            parameters=("vllm_config", "supported_layouts", "kv_cache_specs"),
        ),
        Shape(module="vllm.v1.executor.abstract", symbol="Executor.get_supported_kv_cache_layouts"),
        Shape(module="vllm.v1.executor.abstract", symbol="Executor.set_kv_cache_layout", parameters=("layout_name",)),
        Shape(module="vllm.v1.kv_cache_interface", symbol="KVCacheConfig", fields=("kv_cache_layout",)),
    ),
    symptom="ValueError: KV cache layout has not been resolved yet; it is resolved once by the engine core",
    cause="vLLM 0.29 lets its engine choose the layout (EngineCore._initialize_kv_caches, vllm/v1/engine/core.py)",
    does=(
        "Resolves the layout that all workers support as the engine does, tells them before the cache is planned, and "
        "from 0.32 on also the grain of block hashes."
    ),
    retires=RETIRES,
    evidence="kv-cache-layout",
)
