"""A run that is killed at any point, and resumed, leaves the files of an unbroken one."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import SEQ_LENGTH, digests, run, samples

from vllm_compat.extraction import extract, store
from vllm_compat.extraction.manifest import JOURNAL
from vllm_compat.extraction.settings import Settings

WRITES = 61  # one in so many: torch writes a file in dozens of pieces, and a kill between any two is the same
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
    prompts = samples([5, 9, 40, 7, 3], SEQ_LENGTH)
    monkeypatch.setattr(extract, "load_samples", lambda settings, **known: (prompts, "counted"))
    # What a process has written outlives its kill; a sync is for power failures, and would take most of the time here.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # One writer: the order of calls, and so the point of the kill, is the same in each child.
    whole = settings(output_dir=tmp_path / "whole", writers=1, batch_size=2)
    calls = _run_and_die(whole, 0)
    assert calls > 60, "kills would not reach all kinds of points"
    expected, journal = digests(whole.output_dir), (whole.output_dir / JOURNAL).read_bytes()
    kinds = set()
    for call in range(1, calls + 1):
        broken = settings(output_dir=tmp_path / f"killed {call}", writers=1, batch_size=2)
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
