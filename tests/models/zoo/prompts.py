"""Prompts whose rows a 16-bit forward pass decides.

A router is a jump (`vllm_compat.extraction.routers`). `verify`, which cannot choose its prompts, allows more to rows
that a router may as well send elsewhere. Here there are none, so that the usual tolerance is right for all: each pass
of the reference is repeated with noise on every layer's input, and a token that a router sends elsewhere in some
repetition is replaced by another. vLLM has no say in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from vllm_compat.extraction.routers import listening, otherwise, shaking

FIRST_PLAIN_TOKEN = 3
NOISE = 2.0**-6  # of a row's length: what bfloat16 does in a layer of the tiny Llama to the worst row
REPEATS = 24
MOST_REPLACEMENTS = 1000


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
    replaced = 0
    # The first of a batch has no noise.
    shaken = shaking(reference._layers, NOISE, spared=1)
    with torch.inference_mode(), shaken, listening(reference.routers) as picks:
        for prompt in prompts:
            while True:
                reference._model(input_ids=torch.tensor([prompt] * (1 + REPEATS)), use_cache=False)
                bad = torch.zeros(len(prompt), dtype=torch.bool)
                for each in picks.values():
                    bad |= otherwise(each, each[: len(prompt)])
                if not bad.any():
                    break
                if replaced == MOST_REPLACEMENTS:
                    raise RuntimeError(f"{int(bad.sum())} of {len(prompt)} rows stay undecided")
                prompt[int(bad.nonzero()[0])] = source.randrange(FIRST_PLAIN_TOKEN, vocabulary)
                replaced += 1
    return prompts, replaced
