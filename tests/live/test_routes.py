"""Unmodified scripts on the real pair, each route in a process of its own; what the workers say about theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import _vllm_compat_startup
from _vllm_compat_startup import finder

SCRIPT = """
import json, os, sys

if __name__ == "__main__":
    from speculators.data_generation import VllmHiddenStatesGenerator

    os.environ.update(json.loads(sys.argv[2]))
    generator = VllmHiddenStatesGenerator(
        sys.argv[1], layer_ids=[0, 3], max_model_len=128, gpu_memory_utilization=0.1
    )
    (result,) = generator.generate([[5, 6, 7, 8]])
    assert [len(states) for states in result["hidden_states"]] == [4, 4]
    ours = sys.modules["vllm_compat"]
    ours.require()
    print("STATUS", json.dumps(ours.status()))
"""
STARTUP = any(route in ("pth", "start") for route, _ in finder().taken)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Any:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def call(*command: str, workers: dict[str, str] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """`workers`: environment set after the start of the script, so only its workers' starts see it."""
        arguments = [sys.executable, *command, str(script), str(model), json.dumps(workers or {})]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_COMPAT")}
        return subprocess.run(
            arguments, env={**clean, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )

    return call


def status(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("STATUS ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("STATUS "))
    return answer


@pytest.mark.skipif(not STARTUP, reason="an editable install has no start-up file")
def test_an_unmodified_script_by_the_start_up_file(run: Any) -> None:
    done = run()
    answer = status(done)
    assert (answer["active"], answer["route"]) == (True, answer["routes"][0]["route"])
    assert "patches apply" in done.stderr
    (worker,) = answer["workers"]
    assert (worker["version"], worker["route"]) == (answer["version"], "worker extension")
    assert worker["pid"] != answer["pid"]
    assert worker["patches"] == ["capture", "devices", "hand-over", "workers"]
    taken = [*worker["inherited"], *worker["routes"]]
    assert taken[0] == answer["route"]
    assert {"plugin", "worker extension"} <= set(taken)


def test_run_with_plugins_that_leave_us_out(run: Any) -> None:
    done = run("-m", "vllm_compat", "run", VLLM_PLUGINS="")
    answer = status(done)
    assert answer["route"] == "run"
    (worker,) = answer["workers"]
    taken = [*worker["inherited"], *worker["routes"]]
    assert "plugin" not in taken
    assert {"sitecustomize", "worker extension"} <= set(taken) or "run" in taken


def test_a_worker_that_runs_other_files_is_refused_before_the_model_loads(run: Any, tmp_path: Path) -> None:
    """Another installation's hook comes first on the path of the spawned workers."""
    other = tmp_path / "other"
    shutil.copytree(Path(str(_vllm_compat_startup.__file__)).parent, other / "_vllm_compat_startup")
    with (other / "_vllm_compat_startup" / "hook.py").open("a") as file:
        file.write("# another release\n")
    (other / "sitecustomize.py").write_text("import _vllm_compat_startup.hook\n")
    done = run("-m", "vllm_compat", "run", workers={"PYTHONPATH": str(other), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    assert done.returncode != 0
    assert "STATUS" not in done.stdout
    assert "would run files" in done.stderr + done.stdout
    assert "Make both use one installation" in done.stderr + done.stdout
    assert "Loading weights took" not in done.stderr + done.stdout
