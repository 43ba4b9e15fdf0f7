"""`verify` of what vLLM computes for a mixture of experts, with prompts that nobody has chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.build import build
from zoo.families import FAMILIES, LAYERS

from vllm_compat.extraction.reference import Reference
from vllm_compat.extraction.verification import Options, verify

FAMILY = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE"])
def test_rows_that_went_to_other_experts_are_right(
    name: str, extract: Any, prompts_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layer_ids = build(FAMILY[name], tmp_path / "model").folder, list(range(LAYERS))
    prompts = prompts_of(300, 200, 250)
    results = extract(folder, layer_ids, max_model_len=512).generator.generate(prompts)
    data = tmp_path / "data"
    data.mkdir()
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        ids = torch.tensor(prompt)
        states = [each.clone() for each in result["hidden_states"]]
        sample = {"input_ids": ids, "hidden_states": states, "loss_mask": torch.ones_like(ids)}
        torch.save(sample, data / f"data_{number}.pt")

    options = Options(model=str(folder), folder=data, layer_ids=tuple(layer_ids))
    verdict = verify(options)
    print(verdict.as_text())
    assert verdict.ok, verdict.as_text()
    assert sum(layer.excused for layer in verdict.report.layers) > 0
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "routers", ())
        assert not verify(options).ok, "the fixed tolerance alone calls them wrong"

    path = data / "data_1.pt"
    sample = torch.load(path, weights_only=True)
    sample["hidden_states"][2][[40, 41]] = sample["hidden_states"][2][[41, 40]]
    torch.save(sample, path)
    (group,) = verify(options).faults.groups
    assert (group.fault.kind, group.fault.layer_ids, group.fault.rows) == ("swapped-rows", (2,), 2)
