"""Workers end with their parent, also one that is killed while they load the model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SCRIPT = """
import sys

import vllm_compat


if __name__ == "__main__":
    from speculators.data_generation import VllmHiddenStatesGenerator

    VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[0, 3, 5], max_model_len=512)
"""


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if not any("resource_tracker" in part for part in child.cmdline())]


def wait_until_idle(worker: psutil.Process) -> None:
    """Its threads still look around now and then, a few hundredths of a second in each second."""
    before, used = 0.0, sum(worker.cpu_times()[:2])
    while used - before > 0.5:
        time.sleep(5)
        before, used = used, sum(worker.cpu_times()[:2])


def test_a_parent_killed_before_its_first_word_leaves_no_worker(model: Path, tmp_path: Path) -> None:
    """The worker has loaded the model and waits, in a place where vLLM does not look whether anybody will come."""
    (tmp_path / "extract.py").write_text(SCRIPT)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "extract.py", model], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while "Starting to load model" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGSTOP)
            (worker,) = workers_of(process)
            wait_until_idle(worker)
        finally:
            process.kill()
            process.wait()
    assert "Loading weights took" in (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs([worker], timeout=60)
    for each in alive:
        each.kill()
    assert not alive
