"""Prompts whose rows a 16-bit forward pass decides.

A router that picks experts is a jump: a token whose second and third expert are nearly level goes to another expert
when a rounding falls otherwise, and its row is then another vector, in vLLM as in Hugging Face. No tolerance is right
for such a row, so there are none: each pass of the reference is repeated with noise on every layer's input, and a token
whose row jumps, in some repetitions and not in others, is replaced by another. What merely carries the noise on stays:
its error is about the same each time. vLLM has no say in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

FIRST_PLAIN_TOKEN = 3
NOISE = 2.0**-5  # of a row's length: twice what bfloat16 does in a layer of the tiny Llama to the worst row
JUMP = 2.5  # largest error over the lower quartile; measured where nothing can jump (Llama): at most 1.9
REPEATS = 32
MOST_REPLACEMENTS = 1000


def decided_prompts(checkpoint: Any, lengths: Sequence[int], layer_ids: Sequence[int], *, vocabulary: int) -> Any:
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
    taken: dict[int, torch.Tensor] = {}
    handles = []
    for number, layer in enumerate(layers):
        noise = torch.Generator()

        def shake(module: Any, args: Any, kwargs: Any, number: int = number, noise: Any = noise) -> Any:
            noise.manual_seed(number)
            states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            size = NOISE * states.norm(dim=-1, keepdim=True) / states.shape[-1] ** 0.5
            shaken = states + size * torch.randn(states.shape, generator=noise)
            shaken[0] = states[0]
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": shaken}
            return (shaken, *args[1:]), kwargs

        def take(module: Any, args: Any, output: Any, number: int = number) -> None:
            taken[number] = output[0] if isinstance(output, tuple) else output

        handles += [layer.register_forward_pre_hook(shake, with_kwargs=True), layer.register_forward_hook(take)]
    replaced = 0
    with torch.inference_mode():
        for prompt in prompts:
            while True:
                model(input_ids=torch.tensor([prompt] * (1 + REPEATS)), use_cache=False)
                bad = torch.zeros(len(prompt), dtype=torch.bool)
                for layer_id in layer_ids:
                    error = (taken[layer_id][1:] - taken[layer_id][:1]).norm(dim=-1)
                    bad |= error.amax(dim=0) > JUMP * error.quantile(0.25, dim=0)
                if not bad.any():
                    break
                if replaced == MOST_REPLACEMENTS:
                    raise RuntimeError(f"{int(bad.sum())} of {len(prompt)} rows stay undecided")
                prompt[int(bad.nonzero()[0])] = source.randrange(FIRST_PLAIN_TOKEN, vocabulary)
                replaced += 1
    return prompts, replaced
