"""Actors that are killed, replicas that are lost, and errors; with a fake engine in place of vLLM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import digests, run, settings_of, tell, unbroken

from vllm_compat.extraction import extract
from vllm_compat.extraction.dispatch import Stop
from vllm_compat.extraction.report import Report
from vllm_compat.extraction.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    return settings_of(tmp_path, monkeypatch, batch_size=1, data_parallel=2, ray=cluster)


def test_a_killed_actor_is_replaced_and_its_replica_ends(settings: Any) -> None:
    expected = unbroken(settings())
    for sample in range(4, 11):
        tell(settings(), sample, "slow 2")
    report, failures = Report(folder="ray"), []

    def go() -> None:
        try:
            extract.run(settings(), report, Stop())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    thread = threading.Thread(target=go, daemon=True)  # a failed test must not wait for it
    thread.start()
    end = time.monotonic() + 300
    while len(report.replicas) < 2 or not report.files_written:
        assert not failures, failures
        assert time.monotonic() < end, report
        time.sleep(0.01)
    replica = int(report.replicas[0].split()[1])  # "process 123 on host"
    actor = int(Path(f"/proc/{replica}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    thread.join(300)
    assert not failures, failures
    assert report.outcome == "complete"
    assert digests(settings().output_dir) == expected
    assert report.replaced == 1
    assert not Path(f"/proc/{replica}").exists(), "the replica of a killed actor holds its devices"


def test_a_lost_replica_takes_its_actor_along_and_is_replaced(settings: Any) -> None:
    expected = unbroken(settings())
    for sample in range(4, 11):
        tell(settings(), sample, "slow 1")
    tell(settings(), 3, "lose 1")
    run(settings())
    assert digests(settings().output_dir) == expected


def test_the_first_error_of_the_engine_stops_the_run(settings: Any) -> None:
    tell(settings(), 3, "fail prompt 1 makes no sense")
    with pytest.raises(ValueError, match="prompt 1 makes no sense"):
        run(settings())


def test_a_replica_that_finds_no_room_is_not_waited_for(settings: Any) -> None:
    """Two nodes with one core each, three replicas."""
    expected = unbroken(settings())
    report = run(settings(data_parallel=3))
    assert report.outcome == "complete"
    assert digests(settings().output_dir) == expected


def test_a_model_in_the_current_folder_is_found(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors run where Ray was started."""
    tell(settings(), 3, "fail because the model was found")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="because the model was found"):
        run(settings(target_model_path="model"))
