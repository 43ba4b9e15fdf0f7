"""How far it is, how fast, how long still, and where the time goes. On stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from vllm_compat.extraction.replica import BatchResult

EVERY = 15.0  # seconds between lines where stderr is no terminal


class Progress:
    """Counts what comes in. Times of several replicas are added up; idle is neither computing nor waiting for disk."""

    def __init__(self, *, samples: int, tokens: int) -> None:
        self.samples, self.tokens = samples, tokens  # to be done in this run
        self.samples_done = self.tokens_done = 0
        self.generating = self.waiting = self._there = 0.0
        self._replicas = 0
        self._begin = self._last = time.perf_counter()
        self._bar: Any = None
        self._closed = False

    def replica_ready(self) -> None:
        self._there_until_now()
        if not self._replicas:
            self._begin = self._last  # loading is not part of the rate
            self._open()
        self._replicas += 1

    def _open(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self.tokens,
            unit="tok",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else EVERY,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def add(self, result: BatchResult, samples: int) -> None:
        self.samples_done += samples
        self.tokens_done += result.tokens
        self.generating += result.generating
        self.waiting += result.waiting
        if self._bar is not None:
            self._bar.set_postfix_str(self._text(), refresh=False)
            self._bar.update(result.tokens)

    def close(self) -> None:
        """The clock stands still from now on."""
        self._there_until_now()
        self._closed = True
        if self._bar is not None:
            self._bar.close()

    def _there_until_now(self) -> None:
        if self._closed:
            return
        now = time.perf_counter()
        self._there += self._replicas * (now - self._last)
        self._last = now

    def _text(self) -> str:
        shares = ", ".join(f"{name} {100 * part:.0f} %" for name, part in self.shares().items())
        return f"{self.samples_done}/{self.samples} samples, {self.samples_per_second:.2f} samples/s, {shares}"

    @property
    def seconds(self) -> float:
        """Since the first replica was ready."""
        return self._last - self._begin

    @property
    def samples_per_second(self) -> float:
        self._there_until_now()
        return self.samples_done / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        self._there_until_now()
        return self.tokens_done / self.seconds if self.seconds else 0.0

    def shares(self) -> dict[str, float]:
        """Parts of the replicas' time: they add up to 1."""
        self._there_until_now()
        whole = max(self._there, self.generating + self.waiting, 1e-9)
        parts = {"generate": self.generating / whole, "disk": self.waiting / whole}
        return {**parts, "idle": max(0.0, 1 - sum(parts.values()))}
