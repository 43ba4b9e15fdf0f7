"""Seam "engine configuration": the settings that extraction needs and that the consumer does not give."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from vllm_compat.errors import CompatError
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape

STEP_TOKENS = "VLLM_COMPAT_STEP_TOKENS"


def scheduler_config(original: Callable[..., Any]) -> Callable[..., Any]:
    accepted = inspect.signature(original).parameters

    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        # Chunks of a prompt would be labelled rightly too; whole prompts spare the paged read of earlier chunks.
        ours: dict[str, Any] = {"is_encoder_decoder": False, "async_scheduling": False, "enable_chunked_prefill": False}
        if budget := os.environ.get(STEP_TOKENS):
            if not (budget.isascii() and budget.isdigit()) or int(budget) < kwargs.get("max_num_seqs", 1):
                raise CompatError(
                    f"{STEP_TOKENS}={budget}: expected a whole number of tokens per step, at least the "
                    f"{kwargs.get('max_num_seqs', 1)} prompts that share a step"
                )
            ours |= {"max_num_batched_tokens": int(budget), "enable_chunked_prefill": True}
        kwargs |= {name: value for name, value in ours.items() if name in accepted}
        return original(**kwargs)

    return make


def cache_config(original: Callable[..., Any]) -> Callable[..., Any]:
    known = getattr(original, "__dataclass_fields__", {})

    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        if "user_specified_block_size" in known:  # vLLM 0.18: some attention kernels refuse the consumer's 16
            kwargs.pop("block_size", None)
        if "enable_extensible_kv_cache" in known:  # vLLM 0.34: its engine would commit the memory after the warm-up
            kwargs["enable_extensible_kv_cache"] = False
        # A hit in the prefix cache makes vLLM skip those tokens: their rows would never be computed.
        return original(**{**kwargs, "enable_prefix_caching": False})

    return make


def vllm_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        model, cache = kwargs["model_config"], kwargs["cache_config"]
        # Nearly as vLLM's own engine does (EngineArgs.create_engine_config, vllm/engine/arg_utils.py), which up to 0.25
        # at least cuts off layers that attend to all, too. Models with two kinds of layers set the window themselves;
        # those whose layers all slide read it here, and without it attend to the whole prompt.
        if every_layer_slides(model.hf_text_config):
            cache.sliding_window = model.get_sliding_window()
        return original(**kwargs)

    return make


def every_layer_slides(config: Any) -> bool:
    """Whether a text model's layers have the configuration's window, if it has one: its list of layers says so, or it
    has no such list and its class knows windows (a ``sliding_window`` in a Llama's config.json means nothing)."""
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"sliding_attention"}
    return "sliding_window" in inspect.signature(type(config)).parameters


PATCH = Patch(
    id="engine-configuration",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    targets=(
        Rebind(module=GENERATOR, name="SchedulerConfig", make=scheduler_config),
        Rebind(module=GENERATOR, name="CacheConfig", make=cache_config),
        Rebind(module=GENERATOR, name="VllmConfig", make=vllm_config),
    ),
    shapes=(
        Shape(
            module="vllm.config.scheduler",
            symbol="SchedulerConfig",
            fields=("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
        ),
        Shape(module="vllm.config.cache", symbol="CacheConfig", fields=("enable_prefix_caching", "sliding_window")),
        Shape(
            module="vllm.config.cache", symbol="CacheConfig", fields=("enable_extensible_kv_cache",), releases=">=0.34"
        ),
        Shape(module="vllm.config.model", symbol="ModelConfig.get_sliding_window"),
    ),
    symptom=(
        "pydantic ValidationError: 1 validation error for SchedulerConfig / is_encoder_decoder / Field required; "
        "ValueError: No common block size for 16 (CPU from 0.29 on, MLA); without an error: rows missing after a "
        "prefix-cache hit, rows cut at the step budget, rows that attend beyond the sliding window (Mistral, Phi-3)"
    ),
    cause=(
        "vLLM 0.12 made is_encoder_decoder required and turned prefix caching on by default; 0.11.1 turned chunked "
        "prefill on; 0.14 asynchronous scheduling; 0.34 a KV cache that the engine commits after the warm-up, on CUDA "
        "(vllm/config/scheduler.py, cache.py; EngineCore._initialize_kv_caches). Since 0.11.0 vLLM's engine "
        "sets the window of models whose layers all slide in CacheConfig, and the consumer leaves it out"
    ),
    does=(
        "Passes is_encoder_decoder=False, enable_prefix_caching=False, async_scheduling=False, "
        "enable_chunked_prefill=False and enable_extensible_kv_cache=False where the release has the setting, and the "
        "model's sliding window; lets the workers choose the block size where they can. VLLM_COMPAT_STEP_TOKENS=N sets "
        "the tokens of one step (device memory) and turns chunked prefill on."
    ),
    retires=RETIRES,
    evidence="engine-configuration",
)
