"""Seam "request construction": block hashes where the prefix cache wants them, arguments that left the signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def prefill_request(original: Callable[..., Any]) -> Callable[..., Any]:
    accepted = inspect.signature(original).parameters

    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        if "eos_token_id" not in accepted:
            kwargs.pop("eos_token_id", None)
        # The consumer of 0.4 has one of its own, for the block size that it believes in.
        kwargs["block_hasher"] = _block_hasher()
        # Whatever is cached, every token of this prompt is to be computed: its row is the result.
        kwargs["sampling_params"].skip_reading_prefix_cache = True
        return original(**kwargs)

    return make


def _block_hasher() -> Callable[[Any], list[Any]] | None:
    """What vLLM's engine gives its requests: a hasher where the prefix cache is on (``EngineCore.__init__``)."""
    generator = current_generator()
    cache = generator.vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return None
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    if not hasattr(kv_cache_utils, "NONE_HASH"):  # an engine in this process has its own: leave that one alone
        kv_cache_utils.init_none_hash(hash_function)
    return kv_cache_utils.get_request_block_hasher(
        getattr(generator.scheduler, "hash_block_size", generator.scheduler.block_size), hash_function
    )


PATCH = Patch(
    id="request-construction",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.1"},
    needs=("call-boundary",),
    targets=(Rebind(module=GENERATOR, name="Request", make=prefill_request),),
    shapes=(
        Shape(module="vllm.v1.request", symbol="Request.__init__", parameters=("prompt_token_ids", "block_hasher")),
        Shape(module="vllm.sampling_params", symbol="SamplingParams", fields=("skip_reading_prefix_cache",)),
        Shape(module="vllm.v1.request", symbol="Request.get_skip_reading_prefix_cache", releases="<0.34"),
        Shape(module="vllm.v1.request", symbol="Request.get_prefix_cache_hit_limit", releases=">=0.34"),
        Shape(module="vllm.utils.hashing", symbol="get_hash_fn_by_name"),
        Shape(module="vllm.v1.core.kv_cache_utils", symbol="init_none_hash", parameters=("hash_fn",)),
        Shape(
            module="vllm.v1.core.kv_cache_utils",
            symbol="get_request_block_hasher",
            parameters=("caching_hash_fn",),  # the first one, block_size, became hash_block_size
        ),
    ),
    symptom=(
        "AssertionError in BlockPool.cache_full_blocks (no block_hasher); "
        "TypeError: Request.__init__() got an unexpected keyword argument 'eos_token_id'"
    ),
    cause=(
        "Prefix caching is on by default since vLLM 0.12 and needs hashed requests; 0.17 dropped eos_token_id "
        "(vllm/v1/request.py)"
    ),
    does=(
        "Gives a request the block_hasher (with init_none_hash) that vLLM's engine would give it, never lets it read "
        "cached blocks, and leaves out what the release does not know."
    ),
    retires=RETIRES,
    evidence="request-construction",
)
