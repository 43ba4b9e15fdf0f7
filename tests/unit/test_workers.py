"""The start method, and the proof that each worker is ours: no vLLM, no torch, an executor that only looks like one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_compat
from vllm_compat import ledger
from vllm_compat.errors import CompatError
from vllm_compat.patches import workers
from vllm_compat.patches.worker.fingerprint import EXPECTED, WORKER_SIDE, fingerprint

DRIVER = """
/* As much of the CUDA driver as a question for its state needs: 3 is CUDA_ERROR_NOT_INITIALIZED. */
static int initialised = 0;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!initialised) return 3; *count = 1; return 0; }
"""


def python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for a stand-in of libcuda.so.1")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)], check=True
    )
    return library


def test_the_driver_is_asked_and_left_as_it_is(driver: Path) -> None:
    code = f"""
import ctypes, os
from vllm_compat.patches.workers import cuda_driver_is_initialised as asked, _start_method
assert not asked(), "nobody has loaded a driver"
cuda = ctypes.CDLL({str(driver)!r}, mode=ctypes.RTLD_GLOBAL)
assert not asked() and not asked(), "loaded, as NVML's users do"
assert _start_method() == {{}}
cuda.cuInit(0)
assert asked()
assert _start_method() == {{"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}}
"""
    done = python(code, driver.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("workers are spawned, not forked") == 1


def test_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cuda_driver_is_initialised", lambda: True)
    monkeypatch.setenv(workers.START_METHOD, "spawn")
    assert workers._start_method() == {workers.START_METHOD: "spawn"}
    monkeypatch.setenv(workers.START_METHOD, "fork")
    with pytest.raises(CompatError, match="=fork, but this process has already initialised CUDA"):
        workers._start_method()
    monkeypatch.setattr(workers, "cuda_driver_is_initialised", lambda: False)
    assert workers._start_method() == {}


REPORT: dict[str, Any] = {"pid": 11, "version": "0.1.0", "worker": "some.Worker", "patches": sorted(WORKER_SIDE)}


class Executor:
    """What `proven_executor` needs of one; its "workers" answer what the test says."""

    def __init__(self, reports: list[dict[str, Any]]) -> None:
        self.reports, self.world_size, self.is_shut_down = reports, len(reports), False
        self.told = {name: os.environ.get(name) for name in (EXPECTED, workers.START_METHOD)}
        self.at_start = (sys.modules["torch"].get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
        made.append(self)

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "_vllm_compat_report"
        return self.reports

    def shutdown(self) -> None:
        self.is_shut_down = True


made: list[Executor] = []


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    threads = [8]
    torch = SimpleNamespace(get_num_threads=lambda: threads[-1], set_num_threads=threads.append, threads=threads)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(workers, "cuda_driver_is_initialised", lambda: False)
    monkeypatch.delenv(EXPECTED, raising=False)
    monkeypatch.setattr(workers, "_own", 0)
    monkeypatch.setattr(workers, "_ours", 0)
    monkeypatch.delenv(workers.START_METHOD, raising=False)
    monkeypatch.setattr(ledger, "_workers", [])
    monkeypatch.setattr(ledger, "_entries", [])
    made.clear()

    def call(*differences: dict[str, Any]) -> Executor:
        reports = [{**REPORT, "rank": rank, "fingerprint": fingerprint(), **d} for rank, d in enumerate(differences)]
        executor: Executor = workers.proven_executor(Executor)(reports)
        return executor

    return call


@pytest.mark.parametrize("given", [None, "8"])
def test_forked_workers_start_beside_one_thread(build: Any, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert build({}, {}).at_start == (1, "1")
    assert os.environ.get("OMP_NUM_THREADS") == given
    assert sys.modules["torch"].threads == [8, 1, 8]  # 16 cores have room for them beside two workers


def test_spawned_workers_take_what_they_are_given(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workers.START_METHOD, "spawn")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert build({}).at_start == (8, "4")


def test_a_generator_with_many_workers_takes_no_threads_from_the_next(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)), raising=False)
    build(*[{}] * 8)
    assert sys.modules["torch"].get_num_threads() == 1
    build({})
    assert sys.modules["torch"].get_num_threads() == 8
    sys.modules["torch"].set_num_threads(3)  # by the user
    build({})
    assert sys.modules["torch"].get_num_threads() == 3


def test_threads_are_as_before_if_workers_do_not_start(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_start(self: Any, reports: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Executor, "__init__", no_start)
    with pytest.raises(OSError, match="planted"):
        build({})
    assert sys.modules["torch"].threads == [8, 1, 8]


def test_good_workers_are_kept_in_the_ledger(build: Any) -> None:
    ledger.record("capture", "somewhere", "import")
    executor = build({}, {})
    assert executor.told == {EXPECTED: fingerprint(), workers.START_METHOD: None}
    assert EXPECTED not in os.environ
    assert [each["rank"] for each in vllm_compat.status()["workers"]] == [0, 1]
    assert vllm_compat.status()["workers"][0]["patches"] == sorted(WORKER_SIDE)


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        (({}, {"fingerprint": "other", "version": "0.0.9"}), r"worker rank 1 \(process 11\) runs vllm_compat 0.0.9"),
        (({}, {"rank": 0}), r"expected reports of the worker ranks 0 to 1, got \[0, 0\]"),
        (({"patches": ["workers"]},), r"some.Worker\) something else answers for capture\."),
    ],
)
def test_other_workers_are_refused_and_ended(build: Any, differences: Any, text: str) -> None:
    ledger.record("capture", "somewhere", "import")
    with pytest.raises(CompatError, match=text):
        build(*differences)
    assert made[0].is_shut_down


EXTENSION = """
import json, sys
import vllm_compat.patches.worker.extension as extension
class Base: rank, model_runner = 3, object()
class Worker(Base, extension.HiddenStatesWorkerExtension): pass
class Covered(Worker):
    def _reset_capture(self, call): pass
covered = Worker()
covered._vllm_compat_memory = None
print(json.dumps([each._vllm_compat_report() for each in (Worker(), Covered(), covered)]))
"""


def test_a_worker_reports_what_it_has(tmp_path: Path) -> None:
    import json

    done = python(EXTENSION, tmp_path, **{EXPECTED: fingerprint()})
    assert done.returncode == 0, done.stderr
    report, by_class, by_attribute = json.loads(done.stdout)
    assert report["patches"] == sorted(WORKER_SIDE)
    assert by_class["patches"] == sorted(set(WORKER_SIDE) - {"capture"})
    assert by_attribute["patches"] == sorted(set(WORKER_SIDE) - {"devices"})
    assert (report["rank"], report["worker"], report["inherited"]) == (3, "__main__.Worker", [])
    assert report["model_runner"] == "builtins.object"
    assert report["routes"][-2:] == ["import", "worker extension"]
    assert (report["version"], report["fingerprint"]) == (vllm_compat.__version__, fingerprint())


def test_a_worker_with_other_files_stops_before_it_loads_anything(tmp_path: Path) -> None:
    done = python(EXTENSION, tmp_path, **{EXPECTED: "0123456789abcdef"})
    assert done.returncode == 1
    assert "its parent has 0123456789abcdef. Make both use one installation" in done.stderr


def test_the_worker_part_of_each_patch_is_written_in_the_extension() -> None:
    from vllm_compat.patches import SPECULATORS
    from vllm_compat.patches.worker import extension

    assert set(WORKER_SIDE) <= {patch.id for patch in SPECULATORS.patches}
    names = {name for names in WORKER_SIDE.values() for name in names}
    assert names == {
        name for name in vars(extension.HiddenStatesWorkerExtension) if name.startswith("_") and name[1] != "_"
    }
