"""How fast this process can copy what it was handed: the consumer clones each prompt's rows of each layer.

Both settings are of the whole process, and both are the C library's and torch's own knobs.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakKeyDictionary

# More are faster in most calls and slower over all, because each copy waits for its slowest thread. Twelve calls of
# 131 MB on 32 cores of a shared host: 8 threads took 4.7 to 8.2 ms, 16 took 3.4 to 4.5 and once 73.
MOST_THREADS = 8
# <malloc.h> of glibc, and the largest value that it takes for the second (DEFAULT_MMAP_THRESHOLD_MAX).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST_FROM_HEAP = -1, -3, 32 * 2**20
MARGIN = 2 * LARGEST_FROM_HEAP  # of what else is free beside the results
_kept: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # bytes of its largest call, for each executor that lives


def copying_threads(own: int, workers: int) -> int:
    """Of the ``own`` threads that this process had, as many as find a core to themselves beside ``workers``.

    A thread for each core is worse: every worker keeps a core busy while it waits, OpenMP's threads wait for the
    slowest of them, and the one that shares a core with a worker is late by a time slice. Measured with 32 cores and
    one worker: 32 threads copy 0.5 GB/s. One more core is left to everything else.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, cores - workers - 1, MOST_THREADS))


def keep_freed_memory(executor: Any, size: int) -> None:
    """Let malloc keep as many freed bytes as its largest call's ``size``, and some more, for this executor's next call.

    Else it gives them back to the system and takes them again page by page, which takes longer than the copy.

    Pieces of more than 32 MB (a long prompt's rows of a layer) come from the system all the same. malloc would take
    these from the heap, too (M_MMAP_MAX), and they would be copied faster by far; but with small pieces between that
    outlive them, the heap grew without end where it had been steady: 1000 calls of up to 2 GB took 21 GB.
    """
    if size > _kept.get(executor, 0):
        _kept[executor] = size
        _set_what_is_kept()


def give_back_freed_memory(executor: Any) -> None:
    """No call of this executor is to come. Of the last one's memory nothing is kept; then what glibc itself would keep
    after freeing its largest piece from the heap is enough."""
    if _kept.pop(executor, None) is not None:
        _set_what_is_kept()


def _set_what_is_kept() -> None:
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_HEAP)
    libc.mallopt(M_TRIM_THRESHOLD, min(sum(_kept.values()) + MARGIN, 2**31 - 1))
    if not _kept:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
