"""`verify` of what vLLM computes for a mixture of experts, with prompts that nobody has chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.build import build
from zoo.families import FAMILY, LAYERS

from vllm_compat.extraction.reference import Reference
from vllm_compat.extraction.verification import Options, verify

KIMI = FAMILY["Kimi-K2"]
MODELS = {
    "Mixtral": FAMILY["Mixtral"],
    "Qwen3-MoE": FAMILY["Qwen3-MoE"],
    "Kimi-K2": replace(KIMI, values={**KIMI.values, "n_routed_experts": 64, "num_experts_per_tok": 8}),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_went_to_other_experts_are_right(
    name: str, extract: Any, prompts_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    for setting, value in (MODELS[name].environ_on_cpu if current_platform.is_cpu() else {}).items():
        monkeypatch.setenv(setting, value)
    checkpoint, layer_ids = build(MODELS[name], tmp_path / "model"), list(range(LAYERS))
    prompts = prompts_of(300, 200, 250)
    results = extract(checkpoint.folder, layer_ids, max_model_len=512).generate(prompts)
    data = tmp_path / "data"
    data.mkdir()
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        ids = torch.tensor(prompt)
        states = [each.clone() for each in result["hidden_states"]]
        sample = {"input_ids": ids, "hidden_states": states, "loss_mask": torch.ones_like(ids)}
        torch.save(sample, data / f"data_{number}.pt")

    options = Options(model=str(checkpoint.reference), folder=data, layer_ids=tuple(layer_ids))
    verdict = verify(options)
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
