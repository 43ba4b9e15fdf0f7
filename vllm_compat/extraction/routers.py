"""The routers of a mixture of experts: where they are, what they pick, and noise that shows how surely they pick it.

A router is a jump. Where a token's last expert in and first expert out are nearly level, a rounding that falls
otherwise sends the token elsewhere, and its row is another vector from there on, in vLLM as in Hugging Face.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAMES = ("gate", "router")  # how transformers' classes call them; `gate_proj`, `shared_expert_gate` are none
_CORRECTION = "moe_statics"  # ERNIE 4.5's experts are picked by what this makes of the gate's scores (transformers 4)
# What configurations call the number of experts, and how many of them a token gets.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PICKED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class Router:
    """A module that may pick experts; what it returns tells whether it does."""

    layer: int  # number of its decoder layer
    module: torch.nn.Module
    beside: torch.nn.Module | None  # the module `experts` next to it, which is told the picks
    experts: int
    picked: int  # experts for each token


def find_routers(layers: torch.nn.ModuleList, config: Any) -> tuple[Router, ...]:
    """Those of the decoder `layers`, in order; none if the text model's `config` knows no experts."""
    experts, picked = _first(config, _EXPERTS), _first(config, _PICKED)
    if not experts or not picked:
        return ()
    routers = []
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            owner, _, last = name.rpartition(".")
            if last in _NAMES and not any(part in _NAMES for part in owner.split(".")):
                block = layer.get_submodule(owner)
                corrected = getattr(block, _CORRECTION, module)
                routers.append(Router(number, corrected, getattr(block, "experts", None), experts, picked))
    return tuple(routers)


def _first(config: Any, names: Sequence[str]) -> int | None:
    """The first of these values that is a number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


@contextlib.contextmanager
def listening(routers: Sequence[Router]) -> Iterator[dict[Router, torch.Tensor]]:
    """Gives, while it lasts, what each router picked in the last pass: [rows of the whole batch, experts for each
    token], their numbers ascending."""
    picks: dict[Router, torch.Tensor] = {}

    def hear(router: Router, values: Any) -> None:
        if (numbers := _picked(router, values)) is not None:
            picks[router] = numbers

    def told(router: Router, args: Any, kwargs: Any) -> None:
        # Some classes of transformers 5 pick between the two: what the experts are told is what counts.
        if (numbers := _numbers(router, (*args, *kwargs.values()))) is not None:
            picks[router] = numbers

    with contextlib.ExitStack() as stack:
        for each in routers:
            handle = each.module.register_forward_hook(lambda _m, _args, out, each=each: hear(each, out))
            stack.callback(handle.remove)
            if each.beside is not None:
                handle = each.beside.register_forward_pre_hook(
                    lambda _m, args, kwargs, each=each: told(each, args, kwargs), with_kwargs=True
                )
                stack.callback(handle.remove)
        yield picks


def _picked(router: Router, output: Any) -> torch.Tensor | None:
    """What a router has picked, from what it returns: the experts' numbers, or scores of all experts. None: neither."""
    outputs = output if isinstance(output, tuple) else (output,)
    if (numbers := _numbers(router, outputs)) is not None:
        return numbers
    for scores in outputs:
        if getattr(scores, "ndim", 0) > 1 and scores.shape[-1] == router.experts:
            return _ascending(scores.topk(router.picked, dim=-1).indices)
    return None


def _numbers(router: Router, values: Sequence[Any]) -> torch.Tensor | None:
    for each in values:
        if getattr(each, "ndim", 0) > 1 and not each.is_floating_point() and each.shape[-1] == router.picked:
            return _ascending(each)
    return None


def _ascending(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sort(dim=-1).values.flatten(0, -2)


def otherwise(picks: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Tokens that any pass of a batch sends elsewhere: [tokens], from the `picks` of one router [passes * tokens,
    experts] and the `usual` ones [tokens, experts]."""
    return (picks.view(-1, *usual.shape) != usual).any(dim=2).any(dim=0)


@contextlib.contextmanager
def shaking(layers: Sequence[torch.nn.Module], size: float, *, seed: int = 0, spared: int = 0) -> Iterator[None]:
    """Noise on the input of each of the decoder `layers` while it lasts, `size` of a row's length long; the first
    `spared` of a batch get none. The same seed gives the same noise in each pass."""
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(layers):
            shake = _shaker(size, seed * len(layers) + number, spared)
            stack.callback(layer.register_forward_pre_hook(shake, with_kwargs=True).remove)
        yield


def _shaker(size: float, seed: int, spared: int) -> Any:
    import torch

    def shake(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        noise = torch.Generator(states.device).manual_seed(seed)
        length = size * states.norm(dim=-1, keepdim=True) / states.shape[-1] ** 0.5
        shaken = states + length * torch.randn(states.shape, generator=noise, device=states.device)
        shaken = shaken.to(states.dtype)
        shaken[:spared] = states[:spared]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": shaken}
        return (shaken, *args[1:]), kwargs

    return shake
