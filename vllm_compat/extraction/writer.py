"""Files are written beside the computing, by a few threads, through a queue whose size in bytes is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_compat.extraction.store import save_sample


class Writer:
    """Writes samples to `folder`. `limit`: bytes that may wait; then `submit` waits, and so does the computing.

    The first error is the last file: what waits is dropped, and `submit` raises it.
    """

    def __init__(self, folder: Path, *, threads: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="writer")
        self._room = threading.Condition()
        self._held = 0
        self._error: BaseException | None = None
        self.waited = 0.0  # seconds that `submit` has waited for the disk
        self.writing = 0.0  # seconds of all threads together
        self.most = 0  # bytes held at once, at most

    def submit(self, name: str, sample: Mapping[str, Any], size: int) -> Future[tuple[int, str]]:
        """Write `sample`, of about `size` bytes, to the file `name`; the future has its bytes and SHA-256.

        A sample larger than the limit waits until nothing else is held. Raises the first error of any file.
        """
        begin = time.perf_counter()
        with self._room:
            while self._error is None and self._held and self._held + size > self._limit:
                self._room.wait()
            self.waited += time.perf_counter() - begin
            if self._error is not None:
                raise self._error
            self._held += size
            self.most = max(self.most, self._held)
        return self._pool.submit(self._write, name, sample, size)

    def _write(self, name: str, sample: Mapping[str, Any], size: int) -> tuple[int, str]:
        begin = time.perf_counter()
        try:
            if self._error is not None:
                raise self._error
            return save_sample(self._folder / name, sample)
        except BaseException as error:
            with self._room:
                self._error = self._error or error
            raise
        finally:
            with self._room:
                self.writing += time.perf_counter() - begin
                self._held -= size
                self._room.notify_all()

    def close(self) -> None:
        """Waits for what is being written; what no thread has begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
