"""`--ray` on a local cluster of two CPU nodes with real vLLM: the union is the single run, an actor killed or not."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction import extract, tiny
from vllm_compat.extraction.dispatch import Stop
from vllm_compat.extraction.manifest import read_manifest, read_records
from vllm_compat.extraction.report import Report
from vllm_compat.extraction.settings import Settings

SAMPLES, SEQ_LENGTH, BATCH = 240, 512, 2


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, active: None) -> Callable[..., Settings]:
    folder = tmp_path_factory.mktemp("ray")
    tiny.make_model(folder / "model", layers=6, dtype="bfloat16", max_len=SEQ_LENGTH)
    tiny.make_tokenizer(folder / "model")
    tiny.make_conversations(folder / "chats.jsonl", SAMPLES, words=(20, 400))

    def build(out: str, **given: Any) -> Settings:
        return Settings(
            target_model_path=str(folder / "model"),
            train_data_path=str(folder / "chats.jsonl"),
            output_dir=folder / out,
            token_freq_path=folder / "token_freq.pt",
            hf_cache_dir=str(folder / "cache"),
            seq_length=SEQ_LENGTH,
            batch_size=BATCH,
            layer_ids=(0, 3, 5),
            num_preprocessing_workers=1,
            **given,
        )

    return build


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("data_*.pt")}


@pytest.fixture(scope="module")
def whole(cluster: str, settings: Callable[..., Settings]) -> dict[str, str]:
    """The files of one replica in a process of this machine, with the cluster's settings."""
    report = Report(folder="whole")
    extract.run(settings("whole"), report, Stop())
    assert report.files_written == SAMPLES
    return digests(settings("whole").output_dir)


def test_the_union_equals_the_single_run_although_an_actor_is_killed(
    cluster: str, settings: Callable[..., Settings], whole: dict[str, str]
) -> None:
    asked = settings("ray", data_parallel=2, ray=cluster)
    report, failures = Report(folder="ray"), []

    def run() -> None:
        try:
            extract.run(asked, report, Stop())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a failed test must not wait for it
    thread.start()
    end = time.monotonic() + 900
    while len(report.replicas) < 2 or not (asked.output_dir / "data_0.pt").exists():
        assert not failures, failures
        assert time.monotonic() < end, report
        time.sleep(0.01)
    assert len(read_records(asked.output_dir)) < SAMPLES, "all was done before an actor could be killed"
    replica = int(report.replicas[0].split()[1])  # "process 123 on host"
    actor = int(Path(f"/proc/{replica}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    thread.join(900)
    assert not thread.is_alive()
    assert not failures, failures
    assert report.outcome == "complete"
    assert digests(asked.output_dir) == whole
    manifest = read_manifest(asked.output_dir)
    assert manifest is not None
    assert manifest.complete
    lines = [(settings(name).output_dir / "manifest.files.jsonl").read_bytes() for name in ("whole", "ray")]
    assert lines[0] == lines[1]
    # Ray has started the actor again, and it has computed: its shard went on.
    assert len(set(report.replicas)) == 3
    assert report.replaced == 1


def test_no_cluster_is_told_before_anything_slow() -> None:
    """In a process of its own, since this one may have joined the cluster above."""
    code = (
        "from vllm_compat.extraction.devices import divide; from vllm_compat.extraction.settings import Settings;"
        "divide(Settings(target_model_path='m', train_data_path='d', output_dir='o', ray='127.0.0.1:1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "CompatError: --ray 127.0.0.1:1: no Ray cluster answers" in done.stderr
