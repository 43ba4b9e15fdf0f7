"""What computes in a replica: the consumer's unmodified generator, and what it says about itself."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.extraction.replica import ReplicaSettings


class SpeculatorsEngine:
    """Loads the model. Raises CompatError where nothing can be patched, ValueError for layers that cannot be right."""

    def __init__(self, settings: ReplicaSettings) -> None:
        import vllm_compat

        vllm_compat.activate()
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        from vllm_compat.patches.worker.fingerprint import fingerprint

        self._generator = VllmHiddenStatesGenerator(
            model_path=settings.target_model_path,
            layer_ids=None if settings.layer_ids is None else list(settings.layer_ids),
            max_model_len=settings.seq_length,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
        vllm_compat.require()
        layer_ids = list(self._generator.layer_ids)
        if layer_ids != sorted(set(layer_ids)):
            raise ValueError(
                f"speculators chose the layers {layer_ids}, one of them twice: the model is too small for its choice. "
                "Name layers with --layer-ids"
            )
        model = self._generator.vllm_config.model_config
        status = vllm_compat.status()
        self.states = {
            "layer_ids": layer_ids,
            "hidden_size": int(model.get_hidden_size()),
            "dtype": str(model.dtype),
        }
        self.versions = _versions(status)
        self.patches = list(dict.fromkeys(entry["patch"] for entry in status["patches"]))
        self.fingerprint = fingerprint()
        self.workers = len(status["workers"])

    def generate(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """One call of the consumer's: for each prompt `input_ids` and `hidden_states`."""
        results: list[dict[str, Any]] = self._generator.generate(prompts)
        return results

    @property
    def lost(self) -> bool:
        """A worker process has ended: this process has to be replaced."""
        return bool(self._generator.executor.is_failed)

    def shutdown(self) -> None:
        self._generator.executor.shutdown()

    @staticmethod
    def describe(settings: ReplicaSettings, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Content of `data_config.json`, by the consumer's own class.

        It asks CUDA for the device's name, so it is called in a replica's process, when its workers are gone.
        """
        from speculators.data_generation.config_generator import DataGenerationConfig

        cache = SimpleNamespace(gpu_memory_utilization=settings.gpu_memory_utilization)
        described = SimpleNamespace(  # as much of a generator as the class reads
            model_path=settings.target_model_path,
            tensor_parallel_size=settings.tensor_parallel_size,
            vllm_config=SimpleNamespace(cache_config=cache),
            layer_ids=states["layer_ids"],
        )
        argv, sys.argv = sys.argv, list(settings.command)
        try:
            config = DataGenerationConfig.from_generator(
                generator=described,
                train_data_path=data["train_data_path"],
                seq_length=settings.seq_length,
                cache_dir=data["cache_dir"],
                num_samples=data["num_samples"],
                max_samples=data["max_samples"],
                seed=data["seed"],
            )
        finally:
            sys.argv = argv
        content: dict[str, Any] = config.to_dict()
        return content


def _versions(status: dict[str, Any]) -> dict[str, str]:
    """By module; consumer and runtime as the plan judged them."""
    import platform

    versions = {"python": platform.python_version(), "vllm_compat": str(status["version"])}
    for consumer in status["consumers"]:
        versions |= {module: str(version) for module, version in consumer["versions"].items()}
    for module in ("torch", "transformers"):
        versions.setdefault(module, metadata.version(module))
    return versions
