"""How fast this process can copy what it was handed: the consumer clones each prompt's rows of each layer.

Both settings are of the whole process, and both are the C library's and torch's own knobs.
"""

from __future__ import annotations

import ctypes
import os

# More are faster in most calls and slower over all, because each copy waits for its slowest thread. Twelve calls of
# 131 MB on 32 cores of a shared host: 8 threads took 4.7 to 8.2 ms, 16 took 3.4 to 4.5 and once 73.
MOST_THREADS = 8
# <malloc.h> of glibc: what is freed at the heap's end and kept (-1: whatever there is), from which size on a piece is
# mapped from the system, and how many such pieces there may be, which is what glibc begins with.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
KEEP_ALL, LARGEST_FROM_HEAP, MOST_MAPPED = -1, 32 * 2**20, 65536  # the second is the largest that it takes
MARGIN = 2 * LARGEST_FROM_HEAP  # of what else is free beside the results


def copying_threads(own: int, workers: int) -> int:
    """Of the ``own`` threads that this process had, as many as find a core to themselves beside ``workers``.

    A thread for each core is worse: every worker keeps a core busy while it waits, OpenMP's threads wait for the
    slowest of them, and the one that shares a core with a worker is late by a time slice. Measured with 32 cores and
    one worker: 32 threads copy 0.5 GB/s. One more core is left to everything else.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, cores - workers - 1, MOST_THREADS))


def keep_freed_memory(size: int) -> None:
    """Let malloc keep ``size`` bytes that were freed, and some more, for the next call's results.

    Else it gives them back to the system and takes them again page by page, which takes longer than the copy (with
    prompts of 120 MB a layer: 1.6 GB/s instead of 27). It takes an int: of two gigabytes on it keeps all.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        libc.mallopt(M_TRIM_THRESHOLD, size + MARGIN if size + MARGIN < 2**31 else KEEP_ALL)


def take_large_pieces_from(*, heap: bool) -> None:
    """Where pieces of more than ``LARGEST_FROM_HEAP`` come from; the heap only while results are made, since what
    others free there stays with this process."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_MMAP_MAX, 0 if heap else MOST_MAPPED)


def give_back_freed_memory() -> None:
    """No call is to come: what glibc itself would keep after freeing its largest piece from the heap is enough."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_TRIM_THRESHOLD, MARGIN)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
