"""Seam "KV-cache planning": plan as vLLM's own engine does (``EngineCore._initialize_kv_caches``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape

WORKER_CONFIGS = "vllm_compat_worker_configs"


def leave_specs_alone(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's planner unifies specs itself, and knows hybrid models for which this function fails."""
    return lambda kv_cache_spec: None


def specs_for_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """The planner groups the specs itself; the consumer only carries them from here to there."""
    return lambda kv_cache_spec: kv_cache_spec


def plan_with_vllm(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_config_from_groups(
        vllm_config: Any, kv_cache_groups: dict[str, Any], available_memory: int, kv_cache_specs: Any = None
    ) -> Any:
        """The scheduler's ``KVCacheConfig``, with the workers' own ones attached for the executor.

        Raises:
            ValueError: (vLLM's) the memory does not hold one prompt of ``max_model_len`` tokens.
        """
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs

        workers = vllm_config.parallel_config.world_size
        memory = min([available_memory, *current_generator().executor.kv_cache_limits()])
        specs = [copy.deepcopy(kv_cache_groups) for _ in range(workers)]  # the planner may change them in place
        worker_configs = get_kv_cache_configs(vllm_config, specs, [memory] * workers)
        scheduler_config = generate_scheduler_kv_cache_config(worker_configs)
        setattr(scheduler_config, WORKER_CONFIGS, worker_configs)
        return scheduler_config

    return get_kv_cache_config_from_groups


def planning_executor(original: type) -> type:
    class PlanningExecutor(original):  # type: ignore[valid-type, misc]
        def kv_cache_limits(self) -> list[int]:
            """Bytes that a worker's platform reserves for the cache, where it has such a setting (the CPU build)."""
            reports = self.collective_rpc("_vllm_compat_memory")
            return [report["kv_cache_limit"] for report in reports if report["kv_cache_limit"] is not None]

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            # The consumer repeats the scheduler's configuration; workers need their own, which can differ in layout.
            planned = getattr(kv_cache_configs[0], WORKER_CONFIGS)
            super().initialize_from_config(planned)
            # The engine of releases up to 0.17 tells the workers their number of blocks (FlexAttention asks for it).
            if self._workers_take_block_count:
                self.collective_rpc("initialize_cache", args=(planned[0].num_blocks, 0))

        @property
        def _workers_take_block_count(self) -> bool:
            from vllm.v1.worker.worker_base import WorkerBase

            return hasattr(WorkerBase, "initialize_cache")

    return PlanningExecutor


PATCH = Patch(
    id="kv-cache-planning",
    ranges={"speculators": CONSUMER, "vllm": ">=0.12.0,<0.29"},
    after=("workers",),
    needs=("call-boundary", "capture"),
    targets=(
        Rebind(module=GENERATOR, name="unify_hybrid_kv_cache_specs", make=leave_specs_alone),
        Rebind(module=GENERATOR, name="_get_kv_cache_groups_uniform_spec", make=specs_for_groups),
        Rebind(module=GENERATOR, name="get_kv_cache_config_from_groups", make=plan_with_vllm),
        Rebind(module=GENERATOR, name="MultiprocExecutor", make=planning_executor),
    ),
    shapes=(
        Shape(
            module="vllm.v1.core.kv_cache_utils",
            symbol="get_kv_cache_configs",
            parameters=("vllm_config", "kv_cache_specs", "available_memory"),
        ),
        Shape(
            module="vllm.v1.core.kv_cache_utils",
            symbol="generate_scheduler_kv_cache_config",
            parameters=("kv_cache_configs",),
        ),
    ),
    symptom="TypeError: get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'",
    cause="vLLM 0.12 dropped the argument (vllm/v1/core/kv_cache_utils.py); hybrid models never fitted the helpers",
    does=(
        "Plans with vLLM's get_kv_cache_configs and generate_scheduler_kv_cache_config, and gives each worker its own "
        "configuration. Too little memory for one prompt is vLLM's own error, before the first call."
    ),
    retires=RETIRES,
    evidence="kv-cache-planning",
)
