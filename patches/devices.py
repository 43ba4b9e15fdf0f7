"""Seam "devices": the consumer asks CUDA for memory in the parent; ask the workers instead."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER_03, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape

DATA_CONFIG = "speculators.data_generation.config_generator"


def least_worker_memory(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of the worker that has least free (CPU: host memory divided among workers)."""
    reports = current_generator().executor.collective_rpc("_vllm_compat_memory")
    least = min(reports, key=lambda report: report["free"])
    return least["free"], least["total"]


def device_name(device: Any = None) -> str:
    """From vLLM's platform, which asks NVML; ``torch`` would initialise CUDA to answer."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name(device or 0))


def torch_without_parent_cuda(original: Any) -> Any:
    import wrapt

    class WorkerMemory(wrapt.ObjectProxy):  # type: ignore[misc]
        """``torch.cuda`` whose memory calls never open CUDA in this process."""

        mem_get_info = staticmethod(least_worker_memory)
        get_device_name = staticmethod(device_name)

        def empty_cache(self) -> None:
            """The parent holds no device memory."""

        def is_available(self) -> bool:
            from vllm.platforms import current_platform

            return bool(current_platform.is_cuda_alike())

    class Torch(wrapt.ObjectProxy):  # type: ignore[misc]
        cuda = WorkerMemory(original.cuda)

    return Torch(original)


PATCH = Patch(
    id="devices",
    ranges={"speculators": CONSUMER_03, "vllm": ">=0.11.0"},
    needs=("call-boundary", "capture"),
    targets=(
        Rebind(module=GENERATOR, name="torch", make=torch_without_parent_cuda),
        Rebind(module=DATA_CONFIG, name="torch", make=torch_without_parent_cuda),
    ),
    shapes=(
        Shape(module=GENERATOR, symbol="torch"),
        Shape(module=DATA_CONFIG, symbol="torch"),
        Shape(module="vllm.platforms.interface", symbol="Platform.is_cuda_alike"),
        Shape(module="vllm.platforms.interface", symbol="Platform.get_device_name", parameters=("device_id",)),
    ),
    symptom=(
        "AssertionError: Torch not compiled with CUDA enabled, or RuntimeError: Found no NVIDIA driver; with a GPU: a "
        "CUDA context of the parent on GPU 0, and 'Cannot re-initialize CUDA in forked subprocess' for the next one"
    ),
    cause=(
        "VllmHiddenStatesGenerator calls torch.cuda.mem_get_info and empty_cache in the parent, DataGenerationConfig "
        "asks for the device's name there (vllm#12754)"
    ),
    does=(
        "Answers mem_get_info from the workers (the least of them) and the device's name from vLLM's platform (NVML); "
        "empty_cache does nothing in the parent."
    ),
    retires=RETIRES,
    evidence="devices",
)
