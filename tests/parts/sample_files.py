"""Random prompts, and the files that `verify` reads, as speculators' own script writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids without the special ones."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_sample(folder: Path, number: int, prompt: list[int], states: list[Any]) -> None:
    """`states`: [tokens, hidden] of each layer."""
    ids = torch.tensor(prompt)
    sample = {"input_ids": ids, "hidden_states": states, "loss_mask": torch.ones_like(ids)}
    torch.save(sample, folder / f"data_{number}.pt")
