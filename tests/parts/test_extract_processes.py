"""Replicas in processes of their own: several, lost ones, errors, and signals. Without vLLM, with a fake engine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import LENGTHS, FakeEngine, digests, run, tell, unbroken

from vllm_compat.extraction import extract
from vllm_compat.extraction.dispatch import Stop, Stopped
from vllm_compat.extraction.manifest import JOURNAL, read_manifest, read_records
from vllm_compat.extraction.processes import ProcessReplica, ReplicaLost
from vllm_compat.extraction.replica import Batch, ReplicaSettings
from vllm_compat.extraction.settings import Settings


def test_two_replicas_make_one_set(settings: Any) -> None:
    two = settings(data_parallel=2)
    expected = unbroken(two)
    tell(two, 0, "slow 8")  # or the first replica does it all before the second is there
    report = run(two)
    assert digests(two.output_dir) == expected
    assert len(report.replicas) == 2
    assert report.replaced == 0


def test_a_lost_replica_is_replaced_and_its_batches_go_on(settings: Any) -> None:
    expected = unbroken(settings())
    tell(settings(), 3, "die 1")
    tell(settings(), 6, "lose 1")
    report = run(settings())
    assert digests(settings().output_dir) == expected
    assert report.replaced == 2


def test_a_replica_that_is_lost_too_often_is_the_error(settings: Any) -> None:
    asked = settings(max_restarts=1)
    tell(asked, 3, "die 9")
    with pytest.raises(ReplicaLost) as lost:
        run(asked)
    assert str(lost.value).splitlines() == [
        "replica 0 has ended (exit code -9), and was replaced 1 times before",
        "Exit code -9 is a kill, mostly for lack of memory (see the kernel's log): fewer replicas, a smaller "
        "--write-queue or, for a new --output-dir, a smaller --batch-size",
        "--max-restarts allows more losses",
    ]
    manifest = read_manifest(asked.output_dir)
    assert manifest is not None
    assert manifest.sessions[-1]["outcome"] == "failed"


def test_a_replica_that_may_not_be_replaced_was_not_before(settings: Any) -> None:
    asked = settings(max_restarts=0)
    tell(asked, 3, "lose 1")
    with pytest.raises(ReplicaLost) as lost:
        run(asked)
    assert str(lost.value) == "replica 0 has ended (exit code 75)\n--max-restarts allows more losses"


def test_the_first_error_of_the_engine_stops_the_run(settings: Any) -> None:
    tell(settings(), 3, "fail prompt 1 makes no sense")
    tell(settings(), 6, "slow 120")
    begin = time.monotonic()
    with pytest.raises(ValueError, match="prompt 1 makes no sense"):
        run(settings())
    assert time.monotonic() - begin < 30


def test_a_write_error_stops_the_run_at_once(settings: Any) -> None:
    tell(settings(), 0, "disk 100")  # a file takes no more bytes in that process
    tell(settings(), 3, "slow 120")
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"File too large: .*data_\d+\.pt"):
        run(settings())
    assert time.monotonic() - begin < 60
    assert digests(settings().output_dir) == {}


def _command(settings: Settings) -> list[str]:
    """The command in a process of its own, with the fakes."""
    code = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import fakes
from pathlib import Path
from vllm_compat.extraction import devices, extract, model
from vllm_compat.extraction.settings import Settings
model.look_at = lambda path: model.Model(fakes.WIDTH, "model's hash")
devices.visible = lambda: (None, [])
extract.load_samples = lambda settings, **known: (fakes.samples({LENGTHS}, settings.seq_length), "counted")
extract.from_arguments = lambda arguments: arguments.settings
if __name__ == "__main__":
    import argparse
    from pathlib import PosixPath
    sys.exit(extract.main(argparse.Namespace(settings={settings!r}, json=True)))
"""
    path = Path(settings.target_model_path) / "command.py"
    path.write_text(code)
    return [sys.executable, str(path)]


def _started(settings: Settings, files: int) -> Any:

    process = subprocess.Popen(_command(settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = settings.output_dir
    _wait(process, lambda: (folder / JOURNAL).exists() and len(read_records(folder)) >= files)
    return process


def _wait(process: Any, until: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_signal_stops_cleanly(settings: Any) -> None:
    tell(settings(), 3, "slow 1")
    process = _started(settings(), files=3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    report = json.loads(out)
    assert report["outcome"] == "stopped"
    assert report["files_written"] == 6, "what was being computed is written, and nothing is begun"
    manifest = read_manifest(settings().output_dir)
    assert manifest is not None
    assert (manifest.complete, manifest.sessions[-1]["outcome"]) == (False, "stopped")
    assert json.loads((settings().output_dir / "extract_report.json").read_text()) == report
    assert digests(settings().output_dir).items() <= unbroken(settings()).items()


class LoadsQuicklyOnce(FakeEngine):
    """Its replacement loads as long as a large model."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        first, again = (Path(settings.target_model_path) / name for name in ("loaded", "loads.again"))
        if first.exists():
            again.touch()
            time.sleep(120)
        first.touch()


def test_a_signal_does_not_wait_for_a_replacement_that_loads(settings: Any) -> None:
    asked = settings(engine="test_extract_processes:LoadsQuicklyOnce")
    tell(asked, 3, "die 1")
    process = _started(asked, files=0)
    _wait(process, (Path(asked.target_model_path) / "loads.again").exists)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert time.monotonic() - begin < 30, "nobody computes any more, so nobody needs the model"
    assert process.returncode == 130, err
    report = json.loads(out)
    assert (report["outcome"], report["replaced"]) == ("stopped", 1)


def test_a_replica_that_is_not_built_yet_drains(tmp_path: Path) -> None:
    """It looks for the run's manifest, which is not there, for half a minute."""
    given = ReplicaSettings(
        target_model_path="model",
        output_dir=str(tmp_path),
        session="a run",
        layer_ids=None,
        seq_length=2,
        batch_size=1,
        start_idx=0,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        writers=1,
        write_queue=1,
        command=(),
        engine="fakes:FakeEngine",
        verbose=False,
    )
    replica = ProcessReplica(0, given, {}, max_restarts=1)
    try:
        replica.load()
        before = replica.call("compute", Batch(number=0, first=0, input_ids=[], loss_mask=[], known={}))
        replica.drain()
        after = replica.call("compute", Batch(number=1, first=1, input_ids=[], loss_mask=[], known={}))
        assert (before.result(20), after.result(20)) == (None, None)
    finally:
        replica.close()
        replica.join()


def test_a_second_signal_ends_at_once(settings: Any) -> None:
    tell(settings(), 3, "slow 120")
    process = _started(settings(), files=3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 130
    assert json.loads(out)["outcome"] == "stopped"


def test_replicas_of_a_killed_run_end(settings: Any) -> None:
    tell(settings(), 3, "slow 120")
    process = _started(settings(), files=3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    replicas = [int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    assert len(replicas) == 1
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while Path(f"/proc/{replicas[0]}").exists():
        assert time.monotonic() < end, "it would hold its devices for ever"
        time.sleep(0.05)
    assert read_records(settings().output_dir).keys() == digests(settings().output_dir).keys()


def test_a_signal_outside_of_extracting_ends_at_once() -> None:
    stop = Stop()
    with stop.listening(), pytest.raises(Stopped, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_forked_processes_end_as_they_are_told() -> None:
    """Those of datasets, which tokenize: its pool ends them with SIGTERM, and waits for them for ever."""
    read, write = os.pipe()
    with Stop().listening():
        child = os.fork()
        if child == 0:
            try:
                os.write(write, b"forked")
                time.sleep(60)
            finally:
                os._exit(1)
        assert os.read(read, 6) == b"forked"
        os.kill(child, signal.SIGINT)  # Ctrl-C is for the parent
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_signal_is_told_although_another_error_took_its_place(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of datasets, which looks after its processes before it lets Stopped go on."""

    def broken_off(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise TimeoutError

    monkeypatch.setattr(extract, "load_samples", broken_off)
    monkeypatch.setattr(extract, "from_arguments", lambda arguments: settings())
    assert extract.main(argparse.Namespace(json=True)) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"], report["error"]) == ("stopped", "Ctrl-C")
