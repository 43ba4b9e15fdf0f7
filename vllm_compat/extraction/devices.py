"""Which replica has which devices. Nothing here opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_compat.extraction.dispatch import Remote
from vllm_compat.extraction.replica import ReplicaSettings
from vllm_compat.extraction.settings import Settings


@dataclass(frozen=True)
class Places:
    """Where replicas will be."""

    tensor_parallel_size: int
    environments: tuple[Mapping[str, str], ...]  # of each replica's process; of processes on this machine
    ray: str | None
    max_restarts: int

    def replicas(self, settings: ReplicaSettings) -> list[Remote]:
        """Start them."""
        if self.ray is not None:
            from vllm_compat.extraction import ray_cluster

            return ray_cluster.replicas(len(self.environments), settings, max_restarts=self.max_restarts)
        from vllm_compat.extraction.processes import ProcessReplica

        return [
            ProcessReplica(number, settings, environment, max_restarts=self.max_restarts)
            for number, environment in enumerate(self.environments)
        ]


def divide(settings: Settings) -> Places:
    """Give each replica devices of its own.

    Raises ValueError if there are too few, CompatError without the Ray cluster that is asked for.
    """
    count, size = settings.data_parallel, settings.tensor_parallel_size
    if settings.ray is not None:  # Ray gives them
        from vllm_compat.extraction import ray_cluster

        ray_cluster.join(settings.ray, verbose=settings.verbose)
        return Places(size or 1, ({},) * count, settings.ray, settings.max_restarts)
    variable, devices = visible()
    if variable is None:  # the CPU, which all replicas share
        return Places(size or 1, ({},) * count, None, settings.max_restarts)
    size = size or max(1, len(devices) // count)
    if count * size > len(devices):
        raise ValueError(
            f"--data-parallel {count} x --tensor-parallel-size {size} needs {count * size} devices, {len(devices)} are "
            f"visible ({variable}={os.environ.get(variable, 'not set')})"
        )
    shares = [devices[number * size : (number + 1) * size] for number in range(count)]
    environments = tuple({variable: ",".join(share)} for share in shares)
    return Places(size, environments, None, settings.max_restarts)


def visible() -> tuple[str | None, list[str]]:
    """The environment variable that names devices, and the devices; (None, []) on the CPU.

    vLLM knows its platform from the build and from NVML, and torch counts CUDA devices by NVML: no context is made.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None, []
    variable = str(current_platform.device_control_env_var)
    given = os.environ.get(variable)
    if given is not None:
        return variable, [each.strip() for each in given.split(",") if each.strip()]
    import torch

    return variable, [str(number) for number in range(torch.cuda.device_count())]
