"""Other models than Llama: right by the same comparison, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Prompts = Callable[..., list[list[int]]]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def build(name: str, folder: Path) -> Path:
    """A tiny random model of transformers' class ``name``, with weights at which rows and layers differ clearly."""
    import torch
    import transformers

    from vllm_compat.extraction.tiny import _fill, make_tokenizer

    extra = {"head_dim": 32} if name.startswith(("Qwen3", "Gemma")) else {}
    shape = SHAPE | {"tie_word_embeddings": name == "Cohere"}  # vLLM's Cohere knows no other
    config = getattr(transformers, f"{name}Config")(**shape, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    _fill(model, torch.Generator().manual_seed(0))
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    make_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", ["Qwen2", "Gemma3Text"])
def test_rows_of_another_model_are_right(name: str, extract: Any, prompts_of: Prompts, tmp_path: Path) -> None:
    """Qwen2: pairs that are added. Gemma 3: scaled embeddings and sliding windows, without vLLM's EAGLE-3 marker."""
    extract(build(name, tmp_path / "model"), [0, 2, 3], max_model_len=512).check(prompts_of(90, 300, 1, 45))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Cohere", "its final norm is a LayerNorm, not an RMSNorm"),
        ("StableLm", "its final norm takes 1 of the 2 tensors"),
    ],
)
def test_a_model_whose_pairs_are_not_to_be_added_is_refused(name: str, why: str, extract: Any, tmp_path: Path) -> None:
    """Both return hidden states and a residual that is in them already: their sum is wrong, and does not look it."""
    with pytest.raises(RuntimeError, match=f"is not supported: {why}"):
        extract(build(name, tmp_path / "model"), [0, 2, 3], max_model_len=512)
