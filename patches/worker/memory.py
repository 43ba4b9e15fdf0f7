"""Memory as the worker sees it, so that the parent need not open a device."""

from __future__ import annotations

from typing import Any


def memory_report(worker: Any) -> dict[str, int | None]:
    """Bytes: ``free`` and ``total`` of the worker's device, and ``kv_cache_limit`` where the platform sets one.

    On the CPU the host's memory is shared among the workers, and ``VLLM_CPU_KVCACHE_SPACE`` limits the cache of each.
    """
    device = worker.device if hasattr(worker, "device") else None
    kind = getattr(device, "type", "cpu")
    if kind == "cuda":  # ROCm builds of torch use the same name
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return {"free": free, "total": total, "kv_cache_limit": None}
    if kind == "cpu":
        import psutil

        memory = psutil.virtual_memory()
        workers = worker.vllm_config.parallel_config.world_size
        limit = getattr(worker.vllm_config.cache_config, "cpu_kvcache_space_bytes", None)
        return {"free": memory.available // workers, "total": memory.total // workers, "kv_cache_limit": limit}
    raise NotImplementedError(
        f"vllm_compat: no way to ask a {kind!r} device for its memory is known; expected a CUDA, ROCm or CPU worker"
    )
