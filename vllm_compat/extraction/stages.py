"""The stages of a command that takes a while, told as they come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from vllm_compat.extraction.streams import say


class Stages:
    """Says what happens and how long it took, so that nobody waits before a silent terminal."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.seconds: dict[str, float] = {}
        """By the first word of what was said."""

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        number = "" if self.total is None else f"[{len(self.seconds) + 1}/{self.total}] "
        say(f"{number}{what} ...")
        start = time.perf_counter()
        yield
        self.seconds[what.split()[0]] = time.perf_counter() - start
        say(f"      {time.perf_counter() - start:.1f} s")
