"""Seam "KV-cache planning": plan as vLLM's own engine does (``EngineCore._initialize_kv_caches``)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Lend, Patch, Rebind, Shape, Target, Undo

WORKER_CONFIGS = "vllm_compat_worker_configs"
UTILS, PLANNING = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
MOVED = ("_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs")
"""What the consumer imports from `UTILS`, and vLLM 0.33 has in `PLANNING`."""


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
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

        executor = current_generator().executor
        if any(getattr(spec, "non_causal", False) for spec in kv_cache_groups.values()):
            # As the engine: such layers (prefix LM) cannot see the later chunks of a prompt that is cut.
            vllm_config.scheduler_config.enable_chunked_prefill = False
        memory = min([available_memory, *executor.kv_cache_limits()])
        # The planner may change them in place.
        specs = [copy.deepcopy(kv_cache_groups) for _ in range(vllm_config.parallel_config.world_size)]
        worker_configs = executor.plan_kv_cache(vllm_config, specs, memory)
        scheduler_config = generate_scheduler_kv_cache_config(worker_configs)
        setattr(scheduler_config, WORKER_CONFIGS, worker_configs)
        return scheduler_config

    return get_kv_cache_config_from_groups


def plan_by_specs(vllm_config: Any, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    configs: list[Any] = get_kv_cache_configs(vllm_config, specs, memory)
    return configs


def plan_by_groups(vllm_config: Any, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

    configs: list[Any] = get_kv_cache_configs(
        vllm_config, specs, memory, get_global_kv_cache_groups(vllm_config, specs)
    )
    return configs


def planning_executor(plan: Callable[..., list[Any]], original: type) -> type:
    class PlanningExecutor(original):  # type: ignore[valid-type, misc]
        def plan_kv_cache(self, vllm_config: Any, specs: list[dict[str, Any]], memory: int) -> list[Any]:
            """vLLM's ``KVCacheConfig`` of each worker, from its specs by layer and the bytes that each may use."""
            return plan(vllm_config, specs, [memory] * len(specs))

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


def lend_moved_names() -> Undo:
    """The names that the consumer imports; they are all replaced as soon as it has them."""
    utils, planning = import_module(UTILS), import_module(PLANNING)
    lent = [name for name in MOVED if not hasattr(utils, name)]
    for name in lent:
        setattr(utils, name, getattr(planning, name))

    def take_back() -> None:
        for name in lent:
            delattr(utils, name)

    return take_back


def _targets(plan: Callable[..., list[Any]]) -> tuple[Target, ...]:
    return (
        Rebind(module=GENERATOR, name="unify_hybrid_kv_cache_specs", make=leave_specs_alone),
        Rebind(module=GENERATOR, name="_get_kv_cache_groups_uniform_spec", make=specs_for_groups),
        Rebind(module=GENERATOR, name="get_kv_cache_config_from_groups", make=plan_with_vllm),
        Rebind(module=GENERATOR, name="MultiprocExecutor", make=functools.partial(planning_executor, plan)),
    )


_SCHEDULER_CONFIG = Shape(module=UTILS, symbol="generate_scheduler_kv_cache_config", parameters=("kv_cache_configs",))
_PLANNER = ("vllm_config", "kv_cache_specs", "available_memory")
_DOES = (
    "Plans with vLLM's get_kv_cache_configs and generate_scheduler_kv_cache_config, and gives each worker its own "
    "configuration. Too little memory for one prompt is vLLM's own error, before the first call."
)

PATCH = Patch(
    id="kv-cache-planning",
    ranges={"speculators": CONSUMER, "vllm": ">=0.12.0,<0.33"},
    after=("workers",),
    needs=("call-boundary", "capture"),
    targets=_targets(plan_by_specs),
    shapes=(Shape(module=UTILS, symbol="get_kv_cache_configs", parameters=_PLANNER), _SCHEDULER_CONFIG),
    symptom="TypeError: get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'",
    cause="vLLM 0.12 dropped the argument (vllm/v1/core/kv_cache_utils.py); hybrid models never fitted the helpers",
    does=_DOES,
    retires=RETIRES,
    evidence="kv-cache-planning",
)

MOVED_PATCH = Patch(
    id="kv-cache-planning-moved",
    ranges={"speculators": CONSUMER, "vllm": ">=0.33.0"},
    after=("workers", "kv-cache-planning"),
    needs=("call-boundary", "capture"),
    targets=(
        Lend(module=GENERATOR, name=f"{UTILS}: {', '.join(MOVED)}", do=lend_moved_names),
        *_targets(plan_by_groups),
    ),
    shapes=(
        *(Shape(module=PLANNING, symbol=name) for name in MOVED),
        Shape(module=PLANNING, symbol="get_kv_cache_configs", parameters=(*_PLANNER, "global_kv_cache_groups")),
        Shape(module=PLANNING, symbol="get_global_kv_cache_groups", parameters=("vllm_config", "kv_cache_specs")),
        _SCHEDULER_CONFIG,
    ),
    symptom="ImportError: cannot import name '_get_kv_cache_groups_uniform_spec' from 'vllm.v1.core.kv_cache_utils'",
    cause="vLLM 0.33 moved the planner to vllm/v1/core/kv_cache_planning.py and gives it the model's groups",
    does=f"Lends the old names while the consumer's module is imported, and takes them back. {_DOES}",
    retires=RETIRES,
    evidence="kv-cache-planning-moved",
)
