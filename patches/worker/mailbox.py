"""Errors of ranks that nobody is listening to.

vLLM's parent waits for one rank's reply to a step. If another rank fails alone, the replying one waits for it in a
collective operation, and the parent waits with it. So the failed rank leaves its error in a file that the parent made
(an anonymous one: no name, gone with the processes), and ends itself if the others do not go on.
"""

from __future__ import annotations

import os
import threading

PATH = "VLLM_COMPAT_MAILBOX"
"""Environment variable with the path of the parent's file, as seen by its workers."""
PATIENCE = 10.0
"""Seconds after which a failed rank ends its process, unless the parent has called again (all ranks failed alike)."""


class Mailbox:
    """The parent's end."""

    def __init__(self) -> None:
        self._file: int | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("vllm_compat_errors", os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)

    @property
    def path(self) -> str:
        return "" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> str | None:
        """The first error that a worker has left, if any."""
        if self._file is None:
            return None
        text = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        return text.partition("\0")[0] or None

    def clear(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Post:
    """A worker's end."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def leave(self, text: str) -> None:
        """Leave an error for the parent."""
        if path := os.environ.get(PATH):
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, text.encode() + b"\0")
            finally:
                os.close(file)

    def wait_for_the_others(self) -> None:
        """End this process, which the parent notices, unless ``heard`` comes in time."""
        self._timer = threading.Timer(PATIENCE, os._exit, args=(1,))
        self._timer.daemon = True
        self._timer.start()

    def heard(self) -> None:
        """The parent has called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
