"""`vllm-compat extract` on the installed vLLM: one set of files, however the run was broken and divided."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SAMPLES, SEQ_LENGTH, BATCH = 22, 512, 3
COMMAND = str(Path(sys.executable).with_name("vllm-compat"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_compat.extraction import tiny

    folder = tmp_path_factory.mktemp("extract")
    tiny.make_model(folder / "model", layers=6, dtype="bfloat16", max_len=SEQ_LENGTH)
    tiny.make_tokenizer(folder / "model")
    tiny.make_conversations(folder / "chats.jsonl", SAMPLES, words=(20, 400))
    return folder


def command(world: Path, out: str, *more: str) -> list[str]:
    return [
        *(COMMAND, "extract", "--json", "--target-model-path", str(world / "model")),
        *("--train-data-path", str(world / "chats.jsonl"), "--output-dir", str(world / out)),
        *("--token-freq-path", str(world / "token_freq.pt"), "--hf-cache-dir", str(world / "cache")),
        *("--layer-ids", "0", "3", "5", "--seq-length", str(SEQ_LENGTH), "--batch-size", str(BATCH)),
        *("--num-preprocessing-workers", "1", *more),
    ]


def extract(world: Path, out: str, *more: str) -> dict[str, Any]:
    done = subprocess.run(command(world, out, *more), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("data_*.pt")}


@pytest.fixture(scope="module")
def whole(world: Path, active: None) -> dict[str, Any]:
    """An unbroken run of one replica."""
    return extract(world, "whole")


def test_every_row_is_right(world: Path, whole: dict[str, Any]) -> None:
    """Against a Hugging Face forward pass of each file's prompt."""
    import torch

    from vllm_compat.extraction.compare import compare
    from vllm_compat.extraction.reference import reference_states

    assert (whole["outcome"], whole["samples"], whole["files_written"]) == ("complete", SAMPLES, SAMPLES)
    assert len(whole["patches"]) > 5
    files = [torch.load(world / "whole" / f"data_{number}.pt", weights_only=True) for number in range(SAMPLES)]
    prompts = [file["input_ids"].tolist() for file in files]
    assert len({tuple(prompt) for prompt in prompts}) == SAMPLES
    assert max(map(len, prompts)) == SEQ_LENGTH - 1
    want = reference_states(world / "model", prompts, [0, 3, 5], dtype=torch.bfloat16)
    report = compare([file["hidden_states"] for file in files], want, layer_ids=[0, 3, 5], prompts=prompts)
    assert report.ok, report.as_text()
    config = json.loads((world / "whole" / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [0, 3, 5]
    assert config["data"]["num_samples"] == SAMPLES
    assert "vllm-compat extract --json" in config["reproducibility"]["command"]


def test_killed_and_resumed_with_two_replicas(world: Path, whole: dict[str, Any]) -> None:
    """The files of an unbroken run, byte for byte, although other replicas computed them in another order."""
    out = world / "broken"
    shared = set(os.listdir("/dev/shm"))
    journal = out / "manifest.files.jsonl"
    process = subprocess.Popen(
        command(world, "broken", "--data-parallel", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        end = time.monotonic() + 900
        while not journal.exists() or not journal.read_bytes():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        replicas = _children(process.pid)
        process.kill()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in replicas):
        assert time.monotonic() < end, "replicas of a killed run hold their devices"
        time.sleep(0.1)
    left = digests(out)
    assert left
    assert left.items() <= digests(world / "whole").items()
    for name in sorted(left)[:1]:  # and a hole where one was
        (out / name).unlink()
    report = extract(world, "broken", "--data-parallel", "2")
    assert digests(out) == digests(world / "whole")
    assert report["files_before"] + report["files_written"] == SAMPLES
    assert report["files_written"] > 0
    assert report["differing"] == []
    assert len(report["replicas"]) <= 2
    lines = [(world / name / "manifest.files.jsonl").read_bytes() for name in ("whole", "broken")]
    assert lines[0] == lines[1]
    assert set(os.listdir("/dev/shm")) <= shared | _others_shared(shared)


def _others_shared(before: set[str]) -> set[str]:
    """Files of processes that are not ours: other runs share the machine."""
    held: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held |= {
                line.split("/dev/shm/")[1].split()[0] for line in maps.read_text().splitlines() if "/dev/shm/" in line
            }
    return held


def _children(pid: int) -> Sequence[int]:
    """All processes below one."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *_children(child)]
    return found
