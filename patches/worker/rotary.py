"""A fault of vLLM's CPU build: its rotary kernel turns some queries by wrong angles.

Queries of ``[tokens, heads * width]`` come out right, the same ones as ``[tokens, heads, width]`` do not
(csrc/cpu/pos_encoding.cpp; seen on 0.16.0, 0.25.1 and 0.32.0). Most models give the former. Those with latent attention
give the latter; with YaRN, as published, vLLM does without the kernel on a CPU (``DeepseekScalingRotaryEmbedding``),
without it all their rows but each prompt's first are wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAULT = (
    "vLLM's rotary kernel on this device does not turn its queries as vLLM's own code in torch does (forward_native), "
    "so nearly every row would be wrong; use a GPU"
)
TOKENS = 8
ROUNDING = 2.0**-5  # of a query's length: several steps of bfloat16; another angle is of the order of 1


def rotary_modules(model: Any) -> list[Any]:
    """vLLM's rotary embeddings on the CPU that have a kernel and code in torch."""
    parts = ("cos_sin_cache", "rotary_dim", "forward_native")
    found = [each for each in model.modules() if all(hasattr(each, part) for part in parts)]
    return [each for each in found if each.cos_sin_cache.device.type == "cpu"]


def turns_rightly(rotary: Any, *given: Any) -> bool:
    """Whether the kernel and the code in torch agree.

    Args:
        given: what the model gives it: positions ``[tokens]`` or ``[3, tokens]``, the query, perhaps the key. Only
            their shapes count, since in a warm-up the numbers may all be 0.
    """
    import torch

    positions, *turned = given
    if positions.is_floating_point():  # of images: Llama 4's vision tower gives query and key alone
        return True
    source = torch.Generator().manual_seed(0)
    places = torch.arange(TOKENS).expand(*positions.shape[:-1], TOKENS)
    numbers = [torch.randn(TOKENS, *each.shape[1:], generator=source).to(each.dtype) for each in turned]
    results = [
        turn(places, *(each.clone() for each in numbers))[: len(numbers)]  # both may work in place
        for turn in (rotary.forward, rotary.forward_native)
    ]
    return all(_near(one.flatten(1).float(), other.flatten(1).float()) for one, other in zip(*results, strict=True))


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= ROUNDING * other.norm())
