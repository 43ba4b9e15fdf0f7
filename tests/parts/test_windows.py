"""Whether all layers of a text model slide, told by transformers' own configuration classes."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from vllm_compat.patches.engine_configuration import every_layer_slides

SHAPE = {"num_hidden_layers": 4, "sliding_window": 24}


@pytest.mark.parametrize(
    ("name", "values", "slides"),
    [
        ("MistralConfig", {}, True),
        ("Phi3Config", {}, True),
        ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 0}, True),
        ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2}, False),  # two kinds
        ("Gemma3TextConfig", {"layer_types": ["sliding_attention"] * 4}, True),
        ("Gemma3TextConfig", {"layer_types": ["full_attention"] * 4}, False),
        ("Dots1Config", {"max_window_layers": 4}, False),  # its own way to say that none does
        ("LlamaConfig", {}, False),  # Llama has no windows, whatever its config.json says
    ],
)
def test_every_layer_slides(name: str, values: dict[str, Any], slides: bool) -> None:
    assert every_layer_slides(getattr(transformers, name)(**(SHAPE | values))) is slides
