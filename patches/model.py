"""Seam "model": refused by name before its weights load, where its configuration tells."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from vllm_compat.errors import CompatError
from vllm_compat.log import say
from vllm_compat.patches import _models, _positions
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def vllm_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        config = original(**kwargs)
        model = config.model_config
        if reason := next(reasons(config), None):
            raise CompatError(
                f"vllm_compat: model class {model.architecture} ({model.model}) is not supported: {reason}. Nothing "
                "has been loaded."
            )
        for difference in _positions.differences(vars(model.hf_text_config), max_model_len=model.max_model_len):
            say(logging.WARNING, f"{model.architecture}: {difference}. {_positions.WHAT_THEN}.")
        return config

    return make


def reasons(config: Any) -> Iterator[str]:
    """Why no rows of this model would be right, from a ``VllmConfig``; nothing where it does not tell."""
    model, parallel = config.model_config, config.parallel_config
    if model.using_transformers_backend():
        yield _models.TRANSFORMERS_BACKEND
    if model.runner_type != "generate":
        yield f"vLLM runs it as a {model.runner_type} model; expected one that generates text"
    if model.is_encoder_decoder:
        yield _models.ENCODER_DECODER
    dtype = str(model.dtype).removeprefix("torch.")
    if known := _models.refusal(model.architecture, vars(model.hf_text_config), dtype=dtype, on_cpu=_on_cpu()):
        yield known
    if parallel.pipeline_parallel_size > 1:
        yield _models.PIPELINE
    if getattr(parallel, "use_sequence_parallel_moe", False):
        yield _models.SEQUENCE


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


PATCH = Patch(
    id="model",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    after=("engine-configuration",),
    targets=(Rebind(module=GENERATOR, name="VllmConfig", make=vllm_config),),
    shapes=(
        Shape(module="vllm.config.model", symbol="ModelConfig.using_transformers_backend"),
        Shape(module="vllm.config.model", symbol="ModelConfig.is_encoder_decoder"),
        Shape(module="vllm.config.model", symbol="ModelConfig.architecture"),
        Shape(module="vllm.config.parallel", symbol="ParallelConfig", fields=("pipeline_parallel_size",)),
    ),
    symptom=(
        "after the whole model has loaded: Model … does not support hidden state extraction, "
        "'…' object has no attribute 'model', layers that return what is not understood; without an error: rows of a "
        "residual stream that the ranks share out"
    ),
    cause="speculators 0.3.0 looks at the model only when it is loaded, and then for vLLM's EAGLE-3 marker",
    does=(
        "Refuses by name, before anything is loaded, what the model's configuration shows not to be supported; warns "
        "where this vLLM turns positions otherwise than Hugging Face."
    ),
    retires=RETIRES,
    evidence="model",
)
