"""For the tests of `extract` without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_compat.extraction.settings import Settings

sys.path.append(str(Path(__file__).parent))  # test modules, and the processes of replicas, import `fakes`


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Settings of a run with the fake engine: no model to look at, no data to preprocess."""
    import fakes

    from vllm_compat.extraction import devices, extract, model
    from vllm_compat.extraction.settings import Settings

    (tmp_path / "model").mkdir()
    monkeypatch.setattr(model, "look_at", lambda path: model.Model(fakes.WIDTH, "model's hash"))
    monkeypatch.setattr(devices, "visible", lambda: (None, []))
    prompts = fakes.samples(fakes.LENGTHS, fakes.SEQ_LENGTH)
    monkeypatch.setattr(extract, "load_samples", lambda settings, **known: (prompts, "counted"))

    def build(**given: Any) -> Settings:
        asked = {
            "target_model_path": str(tmp_path / "model"),
            "train_data_path": "sharegpt",
            "output_dir": tmp_path / "out",
            "token_freq_path": tmp_path / "token_freq.pt",
            "seq_length": fakes.SEQ_LENGTH,
            "batch_size": fakes.BATCH,
            "layer_ids": fakes.LAYERS,
            "engine": "fakes:FakeEngine",
        }
        return Settings(**{**asked, **given})

    return build


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is in this process: it starts at once, and a kill takes it along."""
    import fakes

    from vllm_compat.extraction import processes

    monkeypatch.setattr(processes, "ProcessReplica", fakes.InProcess)
