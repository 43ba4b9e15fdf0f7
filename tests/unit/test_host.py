"""Threads and memory of the process that copies results; a real malloc, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat.patches import _host

PIECES, PIECE = 48, 4 * 2**20
CHURN = f"""
import ctypes, resource, sys
from vllm_compat.patches import _host
class Executor: pass
mine, other = Executor(), Executor()
if sys.argv[1] == "keep":
    _host.keep_freed_memory(mine, {PIECES * PIECE})
    _host.keep_freed_memory(other, {PIECE})
    _host.give_back_freed_memory(other)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def call():
    pieces = [libc.malloc({PIECE}) for _ in range({PIECES})]
    for piece in pieces:
        ctypes.memset(piece, 1, {PIECE})
    for piece in pieces:
        libc.free(piece)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def faults_of_a_call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = resident()
# Python's own small pieces take some of what was freed now and then, so a call may need one new large piece.
faults = min(faults_of_a_call() for _ in range(6))
kept = resident() - before
_host.give_back_freed_memory(mine)
print(faults, kept, resident() - before)
"""


def churn(word: str, folder: Path) -> list[int]:
    done = subprocess.run([sys.executable, "-c", CHURN, word], cwd=folder, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_the_next_call_takes_what_was_freed_and_the_last_gives_it_back(tmp_path: Path) -> None:
    pages = PIECES * PIECE // os.sysconf("SC_PAGE_SIZE")
    faults, kept, after = churn("keep", tmp_path)
    assert faults < pages // 100
    assert kept > PIECES * PIECE // 2
    assert after < PIECE
    assert churn("no", tmp_path)[0] > pages // 2, (
        "glibc keeps freed memory by itself: this setting is not needed any more"
    )


@pytest.mark.parametrize(
    ("cores", "own", "workers", "threads"),
    [(32, 32, 1, 8), (128, 128, 8, 8), (8, 8, 1, 6), (16, 16, 8, 7), (2, 2, 1, 1), (1, 1, 8, 1), (32, 4, 1, 4)],
)
def test_threads_that_copy_leave_the_workers_their_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, own: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert _host.copying_threads(own, workers) == threads
