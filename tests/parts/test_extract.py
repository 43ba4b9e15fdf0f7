"""The command's own work without vLLM: a fake engine in real processes, real files, and kills at every point."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction import devices, extract, model, processes, space, store
from vllm_compat.extraction.dispatch import Stop, Stopped
from vllm_compat.extraction.manifest import (
    JOURNAL,
    ManifestError,
    read_manifest,
    read_records,
)
from vllm_compat.extraction.processes import ReplicaLost
from vllm_compat.extraction.report import Report
from vllm_compat.extraction.settings import Settings

LENGTHS = [5, 9, 40, 7, 3, 12, 1, 22, 8, 30, 6]
SEQ_LENGTH = 32
BATCH = 3


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model to look at, no data to preprocess; replicas find the fake engine."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import fakes

    monkeypatch.setattr(model, "look_at", lambda path: model.Model(fakes.WIDTH, "model's hash"))
    monkeypatch.setattr(devices, "visible", lambda: (None, []))
    monkeypatch.setattr(
        extract, "load_samples", lambda settings, **known: (fakes.samples(LENGTHS, settings.seq_length), "counted")
    )


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    (tmp_path / "model").mkdir()

    def build(**given: Any) -> Settings:
        asked = {
            "target_model_path": str(tmp_path / "model"),
            "train_data_path": "sharegpt",
            "output_dir": tmp_path / "out",
            "token_freq_path": tmp_path / "token_freq.pt",
            "seq_length": SEQ_LENGTH,
            "batch_size": BATCH,
            "layer_ids": (1, 3),
            "engine": "fakes:FakeEngine",
        }
        return Settings(**{**asked, **given})

    return build


def run(settings: Settings) -> Report:
    report = Report(folder=str(settings.output_dir))
    extract.run(settings, report, Stop(), command=["extract", "--flag"])
    return report


def unbroken(settings: Settings) -> dict[str, str]:
    """The files of a run in which nothing happens."""
    for told in Path(settings.target_model_path).glob("*.told"):
        told.unlink()
    whole = dataclasses.replace(settings, output_dir=settings.output_dir.with_name("whole"), data_parallel=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "ProcessReplica", InProcess)
        run(whole)
    return digests(whole.output_dir)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("data_*.pt"))}


def tell(settings: Settings, sample: int, what: str) -> None:
    (Path(settings.target_model_path) / f"{1000 * sample + 7}.told").write_text(what)


class InProcess:
    """A replica in this very process: for kills that take everything along, and because it starts at once."""

    def __init__(self, number: int, replica_settings: Any, environment: Any, *, max_restarts: int) -> None:
        from vllm_compat.extraction.replica import Replica

        self.name, self.restarts = f"replica {number}", 0
        self._replica = Replica(replica_settings)

    def call(self, name: str, *args: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            answer = getattr(self._replica, name)(*args)
            future.set_result(answer.result() if name == "compute" and answer else answer)
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future

    def load(self) -> Any:
        return self.call("load")

    def drain(self) -> None:
        self._replica.drain()

    def close(self) -> None:
        self._replica.close()

    def join(self) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ProcessReplica", InProcess)


@pytest.mark.usefixtures("in_process")
def test_files_have_the_format_of_the_official_script(settings: Any) -> None:
    import torch

    report = run(settings())
    out = settings().output_dir
    assert (report.outcome, report.samples, report.files_written) == ("complete", 11, 11)
    assert report.tokens == sum(min(each, SEQ_LENGTH - 1) for each in LENGTHS) == report.tokens_computed
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*(f"data_{number}.pt" for number in range(11)), "data_config.json", "manifest.json", JOURNAL, ".extract.lock"]
    )
    for number, length in enumerate(LENGTHS):
        sample = torch.load(out / f"data_{number}.pt", weights_only=True, mmap=True)
        assert list(sample) == ["input_ids", "hidden_states", "loss_mask"]
        cut = min(length, SEQ_LENGTH - 1)
        assert sample["input_ids"].tolist() == list(range(1000 * number + 7, 1000 * number + 7 + cut))
        assert sample["loss_mask"].tolist() == [each % 2 for each in sample["input_ids"].tolist()]
        assert sample["loss_mask"].dtype == sample["input_ids"].dtype == torch.long
        assert [layer.shape for layer in sample["hidden_states"]] == [(cut, 8)] * 2
        assert all(layer.is_contiguous() and layer.dtype == torch.bfloat16 for layer in sample["hidden_states"])
    config = json.loads((out / "data_config.json").read_text())
    assert config["data"]["num_samples"] == 11
    assert config["command"] == ["extract", "--flag"]

    manifest, records = read_manifest(out), read_records(out)
    assert manifest is not None
    assert manifest.complete
    assert manifest.files == {
        "journal": JOURNAL,
        "journal_bytes": (out / JOURNAL).stat().st_size,
        "journal_sha256": store.sha256_of(out / JOURNAL),
        "count": 11,
        "tokens": report.tokens,
        "bytes": report.bytes_written,
    }
    assert {name: record.sha256 for name, record in records.items()} == digests(out)
    assert [record.batch for record in records.values()] == [number // BATCH for number in range(11)]
    assert manifest.states == {"layer_ids": [1, 3], "hidden_size": 8, "dtype": "torch.bfloat16"}
    assert [session["outcome"] for session in manifest.sessions] == ["complete"]
    assert manifest.patches == ["a-patch"]


@pytest.mark.usefixtures("in_process")
def test_prompts_checksum_can_be_had_from_the_files(settings: Any) -> None:
    import torch

    from vllm_compat.extraction.dataset import add_prompt

    run(settings())
    digest = hashlib.sha256()
    for number in range(len(LENGTHS)):
        sample = torch.load(settings().output_dir / f"data_{number}.pt", weights_only=True)
        add_prompt(digest, sample["input_ids"].numpy(), sample["loss_mask"].numpy())
    manifest = read_manifest(settings().output_dir)
    assert manifest is not None
    assert manifest.request["prompts_sha256"] == digest.hexdigest()


@pytest.mark.usefixtures("in_process")
def test_a_complete_folder_loads_no_model(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(settings())
    before = digests(first_folder := settings().output_dir)
    monkeypatch.setattr(processes, "ProcessReplica", None)
    report = run(settings())
    assert (report.outcome, report.files_before, report.files_written) == ("complete", 11, 0)
    assert digests(first_folder) == before
    assert first.tokens == report.tokens


@pytest.mark.usefixtures("in_process")
def test_start_idx_is_added(settings: Any) -> None:
    """v0.3.0's script subtracts it, and skips or repeats samples."""
    run(settings())
    run(settings(output_dir=settings().output_dir.with_name("other"), start_idx=100))
    expected = {f"data_{int(name[5:-3]) + 100}.pt": digest for name, digest in digests(settings().output_dir).items()}
    assert digests(settings().output_dir.with_name("other")) == expected


WRITES = 23  # one in so many: torch writes a file in dozens of pieces, and a kill between any two is the same
CALLS = ("fsync", "replace", "open", "write", "scandir", "mkdir", "unlink", "ftruncate")


def _run_and_die(settings: Settings, call: int) -> int:
    """Run in a forked child that is killed at its n-th call of the operating system; how often it called, if it lived.

    Odd numbers end before the call, even ones right after it.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        made = 0

        def counting(original: Any, every: int = 1) -> Any:
            calls = itertools.count()

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal made
                if next(calls) % every:
                    return original(*args, **kwargs)
                made += 2
                if made == call + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = original(*args, **kwargs)
                if made == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return counted

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        done = b"failed"
        try:
            for name in CALLS:
                setattr(os, name, counting(getattr(os, name)))
            sink = store.Sink.write
            store.Sink.write = counting(sink, every=WRITES)  # type: ignore[method-assign]
            run(settings)
            done = str(made).encode()
        finally:
            os.writev(write, [done])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return 0
    return int(said)


@pytest.mark.usefixtures("in_process")
def test_a_kill_at_every_point_and_a_resume_give_the_set_of_an_unbroken_run(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    torch.set_num_threads(1)  # forked children have no others
    # What a process has written outlives its kill; a sync is for power failures, and would take most of the time here.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # One writer: the order of calls, and so the point of the kill, is the same in each child.
    whole = settings(output_dir=tmp_path / "whole", writers=1)
    calls = _run_and_die(whole, 0)
    assert calls > 100, "kills would not reach all kinds of points"
    expected, journal = digests(whole.output_dir), (whole.output_dir / JOURNAL).read_bytes()
    kinds = set()
    for call in range(1, calls + 1):
        broken = settings(output_dir=tmp_path / f"killed {call}", writers=1)
        assert _run_and_die(broken, call) == 0, call
        left = digests(broken.output_dir) if broken.output_dir.exists() else {}
        assert left.items() <= expected.items(), f"call {call}: a file that is not whole has its name"
        if call % 3 == 0 and left:  # and once more, in another place
            _run_and_die(broken, call // 2 + 5)
        report = run(broken)
        assert report.differing == []
        assert digests(broken.output_dir) == expected, call
        assert (broken.output_dir / JOURNAL).read_bytes() == journal, call
        extra = {path.name for path in broken.output_dir.iterdir()} - expected.keys()
        assert extra == {"data_config.json", "manifest.json", JOURNAL, ".extract.lock"}, call
        kinds.add((report.files_before > 0, report.unfinished > 0, report.batches_again > 0))
    assert {(True, False, False), (True, True, False), (False, True, False)} <= kinds


@pytest.mark.usefixtures("in_process")
def test_holes_and_broken_files_are_mended_and_whole_batches_computed(settings: Any) -> None:
    run(settings())
    out = settings().output_dir
    expected = digests(out)
    (out / "data_4.pt").unlink()
    with (out / "data_8.pt").open("r+b") as file:
        file.truncate(500)
    content = bytearray((out / "data_10.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (out / "data_10.pt").write_bytes(content)
    (out / "data_11.pt").write_bytes(b"of another set")
    (out / ".data_4.pt.00000000.tmp").write_bytes(b"half")
    report = run(settings())
    assert digests(out) == expected
    assert (report.files_before, report.files_written, report.unfinished) == (8, 3, 1)
    assert report.quarantined == ["data_8.pt", "data_10.pt", "data_11.pt"]
    assert report.batches_again == 3
    assert report.differing == []
    assert sorted(path.name for path in (out / "quarantine").iterdir()) == [
        *("data_10.pt.0.broken", "data_11.pt.0.broken", "data_8.pt.0.broken")
    ]


@pytest.mark.usefixtures("in_process")
def test_a_quick_scan_looks_at_sizes_only(settings: Any) -> None:
    run(settings())
    path = settings().output_dir / "data_10.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(settings(quick_scan=True)).quarantined == []
    assert run(settings()).quarantined == ["data_10.pt"]


@pytest.mark.usefixtures("in_process")
def test_files_that_come_out_otherwise_are_told(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not compute the same twice."""
    import fakes

    run(settings())
    (settings().output_dir / "data_4.pt").unlink()
    original = fakes.FakeEngine.generate

    def otherwise(self: Any, prompts: Any) -> Any:
        results = original(self, prompts)
        results[2]["hidden_states"][0] += 1
        return results

    monkeypatch.setattr(fakes.FakeEngine, "generate", otherwise)
    report = run(settings())
    assert report.differing == ["data_5.pt"]
    assert "does not compute the same twice" in report.warnings[0]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_length": 16}, "seq_length is 16, the folder has 32"),
        ({"batch_size": 4}, "batch_size is 4, the folder has 3"),
        ({"layer_ids": (1, 2)}, r"layer_ids is \[1, 2\], the folder has \[1, 3\]"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"start_idx": 1}, "start_idx is 1"),
    ],
)
def test_a_resume_must_ask_for_the_same(settings: Any, change: dict[str, Any], said: str) -> None:
    run(settings())
    before = digests(settings().output_dir)
    with pytest.raises(ManifestError, match=said):
        run(settings(**change))
    assert digests(settings().output_dir) == before


def test_other_peoples_files_are_left_alone(settings: Any) -> None:
    out = settings().output_dir
    out.mkdir()
    (out / "data_0.pt").write_bytes(b"of the official script")
    with pytest.raises(ManifestError, match="1 data files and no manifest"):
        run(settings())
    assert (out / "data_0.pt").read_bytes() == b"of the official script"


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ProcessReplica", None)
    real = os.statvfs

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 3, 4096, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(space.SpaceError, match=r"11 files with .* tokens need .* 12.0 KiB are free.*are missing"):
        run(settings())
    monkeypatch.setattr(os, "statvfs", real)
    assert not (settings().output_dir / "manifest.json").exists()


def test_a_dry_run_changes_nothing(settings: Any) -> None:
    report = run(settings(dry_run=True))
    assert (report.outcome, report.samples) == ("planned", 11)
    assert report.bytes_needed > 0
    assert not settings().output_dir.exists()


@pytest.mark.parametrize("tokens", [1, 17, 500, 2047])
@pytest.mark.parametrize("layers", [1, 4, 9])
def test_the_plan_is_never_less_than_the_file(tmp_path: Path, tokens: int, layers: int) -> None:
    import torch

    sample = {
        "input_ids": torch.zeros(tokens, dtype=torch.long),
        "hidden_states": [torch.zeros(tokens, 64, dtype=torch.bfloat16) for _ in range(layers)],
        "loss_mask": torch.zeros(tokens, dtype=torch.long),
    }
    size, _ = store.save_sample(tmp_path / "data_0.pt", sample)
    planned = space.file_size(tokens, layers=layers, hidden_size=64)
    assert size <= planned <= size + 2 * space.BLOCK + space.FILE_OVERHEAD


def test_two_replicas_make_one_set(settings: Any) -> None:
    two = settings(data_parallel=2)
    expected = unbroken(two)
    tell(two, 0, "slow 3")  # or the first replica does it all before the second is there
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
    with pytest.raises(ReplicaLost, match=r"replica 0 has ended .exit code -9., and was replaced 1 times before"):
        run(asked)
    manifest = read_manifest(asked.output_dir)
    assert manifest is not None
    assert manifest.sessions[-1]["outcome"] == "failed"


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


@pytest.mark.usefixtures("in_process")
def test_replicas_that_do_not_run_the_same_are_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fakes

    original = fakes.FakeEngine.__init__
    numbers: Iterator[int] = iter(range(9))

    def other(self: Any, given: Any) -> None:
        original(self, given)
        self.versions = {"vllm": f"0.{next(numbers)}"}

    monkeypatch.setattr(fakes.FakeEngine, "__init__", other)
    with pytest.raises(RuntimeError, match=r"replicas do not run the same: versions: .*0\.0.*0\.1"):
        run(settings(data_parallel=2))


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
    import subprocess

    process = subprocess.Popen(_command(settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (settings.output_dir / JOURNAL).exists() or len(read_records(settings.output_dir)) < files:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


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
