"""Inputs are checked before anything is scheduled; the error names prompt and position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_compat.patches._prompts import checked_prompts

VOCABULARY = 100


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([[1, 2], [3, -1]], "prompt 1, position 1: token id -1 is outside the model's vocabulary"),
        ([[1, 100]], "prompt 0, position 1: token id 100 is outside the model's vocabulary"),
        ([[1, 2.0]], "prompt 0, position 1: expected an integer token id, got float 2.0"),
        ([[1, True]], "prompt 0, position 1: expected an integer token id, got bool True"),
        ([[1], [2, [3]]], "prompt 1, position 1: expected an integer token id, got list"),
        ([[1, None]], "prompt 0, position 1: expected an integer token id, got NoneType None"),
        ([[1], []], "prompt 1 is empty"),
        ([], "token_ids cannot be empty"),
        ([1, 2, 3], "prompt 0: expected a sequence of token ids, got int 1"),
        (["abc"], "prompt 0: expected a sequence of token ids, got str 'abc'"),
        ([{9, 5, 7}], "prompt 0: expected a sequence of token ids, got set"),
        ("abc", "expected a batch of token id sequences, got str"),
        (7, "expected a batch of token id sequences, got int"),
        (torch.zeros(3, dtype=torch.long), r"expected shape \[prompts, tokens\], got \(3,\)"),
        (torch.zeros(0, 3, dtype=torch.long), "cannot be empty"),
        (torch.zeros(2, 0, dtype=torch.long), "prompt 0 is empty"),
        (torch.ones(2, 3), "prompt 0, position 0: expected an integer token id, got float 1.0"),
    ],
)
def test_bad_prompts_are_named(token_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_prompts(token_ids, VOCABULARY)


@pytest.mark.parametrize(
    "token_ids",
    [
        [[1, 2, 3], [4, 99]],
        ((1, 2, 3), (4, 99)),
        [torch.tensor([1, 2, 3]), torch.tensor([4, 99], dtype=torch.int32)],
        [[torch.tensor(1), 2, 3], [4, 99]],
        [torch.tensor([1, 2, 3]).numpy(), [4, 99]],
        iter([[1, 2, 3], [4, 99]]),
    ],
)
def test_good_prompts_become_lists_of_ints(token_ids: Any) -> None:
    prompts = checked_prompts(token_ids, VOCABULARY)
    assert prompts == [[1, 2, 3], [4, 99]]
    assert {type(value) for prompt in prompts for value in prompt} == {int}


def test_a_two_dimensional_tensor_is_a_batch() -> None:
    assert checked_prompts(torch.tensor([[1, 2], [3, 4]]), VOCABULARY) == [[1, 2], [3, 4]]
