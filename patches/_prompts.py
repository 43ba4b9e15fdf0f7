"""The check of prompts before anything is scheduled."""

from __future__ import annotations

from typing import Any


def checked_prompts(token_ids: Any, vocab_size: int) -> list[list[int]]:
    """Turn what the consumer's ``generate`` accepts into lists of Python ints, or say what is wrong with it.

    Args:
        token_ids: a sequence of prompts, each a sequence, 1-D integer tensor or array of token ids; or one integer
            tensor of shape ``[prompts, tokens]``.
        vocab_size: the model's vocabulary size; ids must lie in ``[0, vocab_size)``.

    Raises:
        ValueError: naming prompt and position.
    """
    if hasattr(token_ids, "tolist"):  # torch.Tensor or numpy array
        if getattr(token_ids, "ndim", None) != 2:
            raise ValueError(f"token_ids: expected shape [prompts, tokens], got {tuple(token_ids.shape)}")
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes | dict | set | frozenset) or not hasattr(token_ids, "__iter__"):
        raise ValueError(f"token_ids: expected a batch of token id sequences, got {type(token_ids).__name__}")
    prompts = [_checked_prompt(index, prompt, vocab_size) for index, prompt in enumerate(token_ids)]
    if not prompts:
        raise ValueError("token_ids cannot be empty: expected at least one prompt")
    return prompts


def _checked_prompt(index: int, prompt: Any, vocab_size: int) -> list[int]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str | bytes | dict | set | frozenset) or not hasattr(prompt, "__iter__"):
        raise ValueError(
            f"prompt {index}: expected a sequence of token ids, got {type(prompt).__name__} {prompt!r:.80}"
        )
    ids = list(prompt)
    if not ids:
        raise ValueError(f"prompt {index} is empty: expected at least one token id")
    # A set is small (at most the vocabulary), so the common, good case costs one pass in C over the ids.
    if set(map(type, ids)) != {int}:
        ids = [_checked_id(index, position, value) for position, value in enumerate(ids)]
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(p for p, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise ValueError(
            f"prompt {index}, position {position}: token id {ids[position]} is outside the model's vocabulary "
            f"(0 to {vocab_size - 1})"
        )
    return ids


def _checked_id(index: int, position: int, value: Any) -> int:
    """Accept integers of any make (numpy, 0-d tensors); refuse floats, bools, nested lists and the like."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if type(value) is not int:
        raise ValueError(
            f"prompt {index}, position {position}: expected an integer token id, "
            f"got {type(value).__name__} {value!r:.80}"
        )
    return value
