"""Threads and memory of the process that copies results; a real malloc, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat.patches import _host

CHURN = """
import ctypes, resource, sys
from vllm_compat.patches import _host
word, pieces_of_a_call, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if word == "keep":
    _host.keep_freed_memory(pieces_of_a_call * size)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def call():
    _host.take_large_pieces_from(heap=word == "keep")
    pieces = [libc.malloc(size) for _ in range(pieces_of_a_call)]
    _host.take_large_pieces_from(heap=False)
    for piece in pieces:
        ctypes.memset(piece, 1, size)
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
_host.give_back_freed_memory()
print(faults, kept, resident() - before)
"""


def churn(word: str, pieces: int, size: int, folder: Path) -> list[int]:
    command = [sys.executable, "-c", CHURN, word, str(pieces), str(size)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize(
    ("pieces", "megabytes"), [(16, 4), (3, 100), (130, 17)], ids=["small", "large pieces", "more than an int holds"]
)
def test_the_next_call_takes_what_was_freed_and_the_last_gives_it_back(
    pieces: int, megabytes: int, tmp_path: Path
) -> None:
    size = megabytes * 2**20
    pages = pieces * size // os.sysconf("SC_PAGE_SIZE")
    faults, kept, after = churn("keep", pieces, size, tmp_path)
    assert faults < pages // 100
    assert kept > pieces * size // 2
    assert after < 4 * 2**20
    assert churn("no", pieces, size, tmp_path)[0] > pages // 2, (
        "glibc keeps freed memory by itself: this setting is not needed any more"
    )


def test_what_others_free_beside_goes_back_at_once(tmp_path: Path) -> None:
    """A large piece that was not made while results are copied is the system's again."""
    code = """
import ctypes
from vllm_compat.patches import _host
_host.keep_freed_memory(2**31)
_host.take_large_pieces_from(heap=True)
_host.take_large_pieces_from(heap=False)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1])
before = resident()
piece = libc.malloc(2**28)
ctypes.memset(piece, 1, 2**28)
libc.free(piece)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**10


@pytest.mark.parametrize(
    ("cores", "own", "workers", "threads"),
    [(32, 32, 1, 8), (128, 128, 8, 8), (8, 8, 1, 6), (16, 16, 8, 7), (2, 2, 1, 1), (1, 1, 8, 1), (32, 4, 1, 4)],
)
def test_threads_that_copy_leave_the_workers_their_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, own: int, workers: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert _host.copying_threads(own, workers) == threads
