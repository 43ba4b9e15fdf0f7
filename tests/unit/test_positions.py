"""Where vLLM turns positions otherwise than Hugging Face, from configurations and vLLM's source alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_compat.patches._positions import differences

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0], "long_factor": [2.0]}


def vllm(folder: Path, argument: str) -> list[str]:
    """Where a vLLM lies whose YaRN takes this argument."""
    package = folder / "vllm" / "model_executor" / "layers" / "rotary_embedding"
    package.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    source = f"class YaRNScalingRotaryEmbedding:\n    def __init__(self, base, *, {argument}=1):\n        pass\n"
    (package / "yarn_scaling_rope.py").write_text(source)
    return [str(folder)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, None),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0}}, None),  # scales nothing
        ({"rope_scaling": LONG}, "max_model_len over 4096"),
        (
            {"rope_scaling": {"type": "su", "long_factor": []}, "original_max_position_embeddings": 512},
            "max_model_len over 512",
        ),
        ({"rope_scaling": YARN}, None),
        ({"rope_scaling": YARN | {"attention_factor": 1.1386294361119891}}, None),  # what both compute
        ({"rope_scaling": YARN | {"attention_factor": 1.5}}, "it multiplies by 1.139, Hugging Face by 1.5"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "it multiplies by 1.139, Hugging Face by 1"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "apply_yarn_scaling": False}}, None),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "kv_lora_rank": 512}, None),  # DeepSeek's own
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": LONG}}, "over 4096"),
    ],
)
def test_what_is_said(tmp_path: Path, config: dict[str, Any], said: str | None) -> None:
    found = list(differences(config, path=vllm(tmp_path, "attn_factor")))
    assert [said is not None and said in each for each in found] == [True] * (said is not None)


def test_long_factors_only_beyond_the_original_length() -> None:
    assert not list(differences({"rope_scaling": LONG}, max_model_len=4096))
    assert len(list(differences({"rope_scaling": LONG}, max_model_len=4097))) == 1


def test_a_vllm_that_reads_the_factor(tmp_path: Path) -> None:
    config = {"rope_scaling": YARN | {"attention_factor": 1.5}}
    assert not list(differences(config, path=vllm(tmp_path, "attention_factor")))


@pytest.mark.parametrize(("statement", "said"), [("self.use_long_rope = True", False), ("pass", True)])
def test_a_vllm_that_chooses_the_factors_in_each_step(tmp_path: Path, statement: str, said: bool) -> None:
    path = vllm(tmp_path, "attn_factor")
    source = f"class Phi3LongRoPEScaledRotaryEmbedding:\n    def __init__(self, base):\n        {statement}\n"
    file = tmp_path / "vllm" / "model_executor" / "layers" / "rotary_embedding" / "phi3_long_rope_scaled_rope.py"
    file.write_text(source)
    (text,) = differences({"rope_scaling": LONG}, path=path)
    assert ("of a step in which one is longer" in text) == said
