"""A fault of vLLM's CPU build: its rotary kernel turns queries of ``[tokens, heads, width]`` by wrong angles.

The same numbers as ``[tokens, heads * width]`` come out right (csrc/cpu/pos_encoding.cpp; seen on 0.16.0 and 0.32.0).
Most models give the latter. Those with latent attention give the former, and all their rows but each prompt's first are
wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAULT = (
    "vLLM's rotary kernel on this device does not turn its queries, of shape [tokens, heads, width], as it turns the "
    "same ones of shape [tokens, heads * width], so nearly every row would be wrong; use a GPU"
)
TOKENS = 8


def rotary_modules(model: Any) -> list[Any]:
    """vLLM's rotary embeddings on the CPU, by what every one of them has."""
    found = [each for each in model.modules() if hasattr(each, "cos_sin_cache") and hasattr(each, "rotary_dim")]
    return [each for each in found if each.cos_sin_cache.device.type == "cpu"]


def turns_alike(rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> bool:
    """Whether the shape makes no difference to queries and keys like these (their numbers may be a warm-up's zeros)."""
    import torch

    if query.dim() < 3:
        return True
    places = torch.arange(TOKENS).expand(*positions.shape[:-1], TOKENS)
    source = torch.Generator().manual_seed(0)
    shaped = [
        None if each is None else torch.randn(TOKENS, *each.shape[1:], generator=source).to(each.dtype)
        for each in (query, key)
    ]
    flat = [None if each is None else each.flatten(1).clone() for each in shaped]  # it works in place
    right, given = rotary.forward(places, *flat)[0], rotary.forward(places, *shaped)[0]
    # The same kernel on the same numbers: what differs by more than a rounding is another angle.
    return torch.allclose(given.flatten(1).float(), right.flatten(1).float(), rtol=2**-6, atol=2**-6)
