"""Seam "devices" of speculators 0.4, which asks `torch.accelerator` in the parent; ask the workers instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches._names import CONSUMER_04, GENERATOR, RETIRES
from vllm_compat.patches.devices import DATA_CONFIG, device_name, least_worker_memory
from vllm_compat.registry import Patch, Rebind, Shape


def worker_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    return least_worker_memory


def nothing_to_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: None  # the parent holds no device memory


def name_from_platform(original: Callable[..., Any]) -> Callable[..., Any]:
    return device_name


def torch_without_parent_devices(original: Any) -> Any:
    import wrapt

    class StatelessAccelerator(wrapt.ObjectProxy):  # type: ignore[misc]
        """``torch.accelerator`` that counts devices without initialising their driver (``torch.cuda`` asks NVML)."""

        def device_count(self) -> int:
            from vllm.platforms import current_platform

            return int(original.cuda.device_count()) if current_platform.is_cuda_alike() else 0

    class Torch(wrapt.ObjectProxy):  # type: ignore[misc]
        accelerator = StatelessAccelerator(original.accelerator)

    return Torch(original)


PATCH = Patch(
    id="accelerator-calls",
    ranges={"speculators": CONSUMER_04, "vllm": ">=0.12.0"},
    after=("devices",),
    needs=("call-boundary", "capture"),
    targets=(
        Rebind(module=GENERATOR, name="mem_get_info", make=worker_memory),
        Rebind(module=GENERATOR, name="empty_cache", make=nothing_to_empty),
        Rebind(module=DATA_CONFIG, name="get_device_name", make=name_from_platform),
        Rebind(module=DATA_CONFIG, name="torch", make=torch_without_parent_devices),
    ),
    shapes=(
        Shape(module=GENERATOR, symbol="mem_get_info"),
        Shape(module=GENERATOR, symbol="empty_cache"),
        Shape(module=DATA_CONFIG, symbol="get_device_name"),
        Shape(module="vllm.platforms.interface", symbol="Platform.is_cuda_alike"),
        Shape(module="vllm.platforms.interface", symbol="Platform.get_device_name", parameters=("device_id",)),
    ),
    symptom=(
        "RuntimeError: Found no NVIDIA driver, or AssertionError: Torch not compiled with CUDA enabled; with a GPU: a "
        "CUDA context of the parent on GPU 0"
    ),
    cause="speculators 0.4 asks torch.accelerator for memory and devices in the parent (speculators/utils/util.py)",
    does="Answers mem_get_info from the workers (the least of them) and the device's name from vLLM's platform (NVML).",
    retires=RETIRES,
    evidence="accelerator-calls",
)
