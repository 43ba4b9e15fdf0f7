"""Prompts whose rows a 16-bit forward pass decides.

A router that picks experts is a jump: a token whose second and third expert are nearly level goes to another expert
when a rounding falls otherwise, and its row is then another vector, in vLLM as in Hugging Face. No tolerance is right
for such a row, so there are none: each pass of the reference is repeated with noise on every layer's input, and a token
that a router sends elsewhere in some repetition is replaced by another. vLLM has no say in it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

FIRST_PLAIN_TOKEN = 3
NOISE = 2.0**-6  # of a row's length: what bfloat16 does in a layer of the tiny Llama to the worst row
REPEATS = 24
MOST_REPLACEMENTS = 1000
ROUTERS = ("gate", "router")  # how transformers' classes call them


def decided_prompts(checkpoint: Any, lengths: Sequence[int], *, vocabulary: int) -> Any:
    """Random prompts of these lengths.

    Returns:
        the prompts, and how many tokens were replaced.

    Raises:
        RuntimeError: rows stay undecided whatever the token: the model amplifies noise by itself.
    """
    import torch

    source = random.Random(f"{lengths}")
    prompts = [[source.randrange(FIRST_PLAIN_TOKEN, vocabulary) for _ in range(length)] for length in lengths]
    reference = checkpoint.load()
    model, layers = reference._model, reference._layers
    picks: list[torch.Tensor] = []
    handles = [
        layer.register_forward_pre_hook(_shaker(number), with_kwargs=True) for number, layer in enumerate(layers)
    ]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ROUTERS:
            experts = model.config.get_text_config().num_experts_per_tok
            take = functools.partial(_picked, experts)
            handles.append(module.register_forward_hook(lambda _m, _a, out, take=take: picks.append(take(out))))
    replaced = 0
    with torch.inference_mode():
        for prompt in prompts:
            while True:
                picks.clear()
                model(input_ids=torch.tensor([prompt] * (1 + REPEATS)), use_cache=False)
                bad = torch.zeros(len(prompt), dtype=torch.bool)
                for each in picks:
                    each = each.view(1 + REPEATS, len(prompt), -1)
                    bad |= (each != each[:1]).any(dim=2).any(dim=0)
                if not bad.any():
                    break
                if replaced == MOST_REPLACEMENTS:
                    raise RuntimeError(f"{int(bad.sum())} of {len(prompt)} rows stay undecided")
                prompt[int(bad.nonzero()[0])] = source.randrange(FIRST_PLAIN_TOKEN, vocabulary)
                replaced += 1
    for handle in handles:
        handle.remove()
    return prompts, replaced


def _shaker(number: int) -> Any:
    """Noise on a layer's input, the same in each pass; none on the first of the batch."""
    import torch

    noise = torch.Generator()

    def shake(module: Any, args: Any, kwargs: Any) -> Any:
        noise.manual_seed(number)
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        size = NOISE * states.norm(dim=-1, keepdim=True) / states.shape[-1] ** 0.5
        shaken = states + size * torch.randn(states.shape, generator=noise)
        shaken[0] = states[0]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": shaken}
        return (shaken, *args[1:]), kwargs

    return shake


def _picked(experts: int, output: Any) -> Any:
    """Which experts a router has picked, ``[rows, experts]`` in ascending order: it returns their numbers, or scores of
    all experts."""
    outputs = output if isinstance(output, tuple) else (output,)
    numbers = next((each for each in outputs if not each.is_floating_point()), None)
    if numbers is None:
        numbers = outputs[0].topk(experts, dim=-1).indices
    return numbers.sort(dim=-1).values.flatten(0, -2)
