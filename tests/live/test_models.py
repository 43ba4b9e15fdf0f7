"""Other models than Llama: right by the same comparison, or refused by name.

A few of the table's families (docs/models.md), each for one reason; `tox -e models` runs them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zoo.build import build
from zoo.families import FAMILY, LAYERS, VOCABULARY
from zoo.prompts import decided_prompts

LAYER_IDS = list(range(LAYERS))


@pytest.mark.parametrize(
    "name",
    [
        "Mistral",  # the window that vLLM's own engine sets
        "Gemma-3",  # scaled embeddings and two kinds of layers, without vLLM's EAGLE-3 marker
        "GLM-4-MoE",  # experts, no marker either
    ],
)
def test_rows_are_right(name: str, extract: Any, tmp_path: Path) -> None:
    checkpoint = build(FAMILY[name], tmp_path)
    extraction = extract(checkpoint.folder, LAYER_IDS, max_model_len=512)
    prompts, _ = decided_prompts(checkpoint, (90, 70, 1, 45), vocabulary=VOCABULARY)
    extraction.check(prompts)


@pytest.mark.parametrize("name", ["Cohere", "StableLM", "Transformers-backend"])
def test_refused_by_name_before_loading(name: str, extract: Any, tmp_path: Path) -> None:
    """No worker is started: the first two would return a stream that is not one, and does not look it."""
    family = FAMILY[name]
    with pytest.raises(Exception, match=f"model class .*{family.refused}.* Nothing has been loaded"):
        extract(build(family, tmp_path).folder, LAYER_IDS, max_model_len=512)


def test_refused_right_after_loading_where_the_configuration_does_not_tell(
    extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the knowledge of the class taken away, the model's own final norm still gives it away."""
    from vllm_compat.patches import _models

    monkeypatch.setattr(_models, "REFUSED", {})
    with pytest.raises(RuntimeError, match="CohereForCausalLM is not supported: its final norm is a LayerNorm"):
        extract(build(FAMILY["Cohere"], tmp_path).folder, LAYER_IDS, max_model_len=512)


def test_a_rotary_kernel_that_is_wrong_is_seen_in_any_model(
    extract: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build has one; on a GPU nothing is refused, and the rows are right (``tests/gpu``)."""
    from vllm.platforms import current_platform

    from vllm_compat.patches import model

    monkeypatch.setattr(model, "_on_cpu", lambda: False)  # the configuration's refusal would come first
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    folder = build(FAMILY["DeepSeek-V2"], tmp_path).folder
    if current_platform.is_cpu():
        with pytest.raises(RuntimeError, match="DeepseekV2ForCausalLM is not supported: vLLM's rotary kernel"):
            extract(folder, LAYER_IDS, max_model_len=512)
    else:
        extract(folder, LAYER_IDS, max_model_len=512)
