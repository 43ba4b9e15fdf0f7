"""The reference finds the decoder layers, and the final norm, of classes that call them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_compat.extraction.reference import Reference

SMALL = {"vocab_size": 100}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("GPT2Config", {"n_layer": 3, "n_embd": 64, "n_head": 2}),
        ("GPTNeoXConfig", {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2}),
        ("MptConfig", {"n_layers": 3, "d_model": 64, "n_heads": 2}),
        ("LlamaConfig", {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2}),
    ],
)
def test_layers_and_norm(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SMALL | values))).eval()
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, dtype=torch.float32)
    prompt = [5, 6, 7, 8]
    first, last = reference.states(prompt, [0, 2])
    with torch.inference_mode():
        own = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert reference.layers == 3
    assert torch.equal(first, own[1][0])
    assert torch.equal(reference.normed(last), own[3][0])  # transformers' last entry is normed already
