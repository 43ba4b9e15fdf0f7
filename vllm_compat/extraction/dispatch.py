"""Hands batches to replicas until all are done, the first error, or a signal. Knows neither processes nor Ray.

Batches are not divided beforehand: a replica gets the next one when it has room, so a slow or replaced one holds up
nobody. Each batch goes to one replica.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import FrameType
from typing import Any, Protocol

from vllm_compat.extraction.replica import Batch, BatchResult, Facts
from vllm_compat.extraction.streams import say

DEPTH = 4  # batches that a replica may have: one that is computed, one that waits, two whose files are written
TICK = 0.25  # seconds


class Remote(Protocol):
    """A replica somewhere else. A lost one is replaced, and its calls are made again, without anybody noticing here."""

    name: str
    restarts: int  # as far as is known here

    def load(self) -> Future[Any]: ...
    def call(self, name: str, *args: Any) -> Future[Any]: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...


class Stopped(KeyboardInterrupt):
    """A signal came while there was nothing to finish, or for the second time."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stop:
    """Ctrl-C and SIGTERM. While `gentle`, the first one only asks to stop, and the second one is Stopped."""

    def __init__(self) -> None:
        self.gentle = False
        self.number: int | None = None
        self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to whoever runs the main thread
            return
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        self._listening = True
        os.register_at_fork(after_in_child=self._leave_it_to_the_parent)
        try:
            yield
        finally:
            self._listening = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave_it_to_the_parent(self) -> None:
        """In forked processes, as those that tokenize: raised in them, Stopped would keep SIGTERM from ending them, and
        the parent waits for that."""
        if self._listening:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if not self.gentle or self.number is not None:
            self.number = number
            raise Stopped(number)
        self.number = number
        say("stopping: what is being computed is still written; the same command goes on later. Once more: at once")

    def is_set(self) -> bool:
        return self.number is not None


def dispatch(
    replicas: Sequence[Remote],
    batches: Iterator[Batch],
    *,
    stop: Stop,
    on_facts: Callable[[Facts], None],
    on_result: Callable[[BatchResult], None],
) -> Remote:
    """Returns when every batch is done, or when `stop` was heard and what had begun is done; nobody waits for replicas
    that are still loading, or that find no room. After `stop` that also holds for one that loads in a lost one's place:
    `drain` answers what it was to compute. Raises the first error. Gives the replica that answered last: it is there.
    """
    last = replicas[0]
    waiting: dict[Future[Any], Remote] = {replica.load(): replica for replica in replicas}
    has: Counter[str] = Counter()
    loading = set(waiting)
    draining = handed_out = False
    while waiting:
        done, _ = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
        for future in done:
            replica = waiting.pop(future)
            try:
                answer = future.result()
            except Exception as error:
                if stop.is_set():  # a signal to the whole group takes the replicas along
                    say(f"{replica.name} did not finish: {type(error).__name__}: {error}".splitlines()[0])
                    continue
                raise
            if future in loading:
                on_facts(answer)
            else:
                has[replica.name] -= 1
                if answer is not None:
                    on_result(answer)
            last = replica
            while not (stop.is_set() or handed_out) and has[replica.name] < DEPTH:
                if (batch := next(batches, None)) is None:
                    handed_out = True
                    break
                waiting[replica.call("compute", batch)] = replica
                has[replica.name] += 1
        if stop.is_set() and not draining:
            draining = True
            for replica in replicas:
                replica.drain()
        if stop.is_set() or handed_out:
            waiting = {future: replica for future, replica in waiting.items() if future not in loading}
    return last
