"""`vllm-compat demo` on the installed vLLM: every row right, and stdout free for the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import device_name


def demo(*args: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, without the settings that the test run itself may have."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HF_"))}
    command = [str(Path(sys.executable).with_name("vllm-compat")), "demo", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo with its defaults, and the folder that it has filled."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    return demo("--json", "--output-dir", str(folder)), folder


def test_defaults_as_json(made: tuple[subprocess.CompletedProcess[str], Path], evidence: Any) -> None:
    done, folder = made
    assert done.returncode == 0, done.stderr[-4000:]
    verdict = json.loads(done.stdout)  # all of stdout: no log line of vLLM's, gloo's or the consumer's
    assert verdict["ok"] is True
    assert verdict["problems"] == []
    assert verdict["patches"]
    assert verdict["dtype"] == "torch.bfloat16"
    assert verdict["versions"]["speculators"] == "0.3.0"
    assert verdict["samples"] == 12
    assert verdict["tokens_per_second"] > 0
    # One call does not fit one step of the scheduler: the case in which rows got mixed up.
    assert verdict["largest_batch"] > 8192
    assert [layer["layer_id"] for layer in verdict["layers"]] == verdict["layer_ids"] == [2, 4, 5, 7]
    assert verdict["margin"] > 0.2
    assert verdict["model_runner"].endswith("ModelRunner")
    for layer in verdict["layers"]:
        assert layer["rows"] == verdict["tokens"]
        assert layer["min_cosine"] > 0.99
        assert 0 < layer["max_relative_error"] < layer["tolerance"]

    evidence.add(
        verdict["layers"],
        device=device_name(),
        tensor_parallel=verdict["tensor_parallel_size"],
        dtype=verdict["dtype"],
        versions=verdict["versions"],
        model_runner=verdict["model_runner"],
        patches=verdict["patches"],
    )

    out = folder / "training_data"
    assert {path.name for path in out.iterdir()} == {f"data_{n}.pt" for n in range(12)} | {"data_config.json"}
    config = json.loads((out / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [2, 4, 5, 7]
    assert config["data"]["num_samples"] == 12


def test_verify_judges_what_vllm_wrote(made: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path) -> None:
    """Files of the consumer on real vLLM, without a manifest; then a fault in one of them."""
    import torch

    from vllm_compat.extraction.verification import Options, verify

    folder = made[1]
    verdict = verify(Options(model=str(folder / "model"), folder=folder / "training_data", files=3))
    assert verdict.ok, verdict.as_text()
    assert (verdict.files, len(verdict.recomputed)) == (12, 3)
    assert verdict.layers_from == "the folder"
    assert verdict.made_with["speculators"] == "0.3.0"
    assert verdict.report.margin > 0.2
    for layer in verdict.report.layers:
        assert layer.rows == verdict.report.rows
        assert 0 < layer.max_relative_error < layer.tolerance

    sample = torch.load(folder / "training_data" / "data_0.pt", weights_only=True)
    sample["hidden_states"] = [states.roll(1, dims=0) for states in sample["hidden_states"]]
    torch.save(sample, tmp_path / "data_0.pt")
    verdict = verify(Options(model=str(folder / "model"), folder=tmp_path))
    assert [group.fault.kind for group in verdict.faults.groups] == ["shifted-rows"], verdict.as_text()
    assert "rows look shifted by +1" in verdict.as_text()


def test_tensor_parallel_as_text() -> None:
    done = demo("--tensor-parallel-size", "2", "--samples", "9", "--layers", "0", "6", "7")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("versions ")
    assert "tensor parallel 2" in lines[1]
    assert lines[-1].startswith("OK: ")
    assert "[1/6]" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--samples", "0"], "samples is 0, expected 1 or more"),
        (["--layers", "8"], "layer 8 is not one of the model's layers 0 to 7"),
        (["--layers", "5", "2"], "must ascend"),
    ],
)
def test_impossible_options_are_refused_at_once(args: list[str], said: str) -> None:
    done = demo("--json", *args, timeout=60)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    assert said in answer["error"]
    assert "[1/6]" not in done.stderr


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_bytes(b"mine")
    done = demo("--output-dir", str(tmp_path), timeout=60)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data_0.pt"]
