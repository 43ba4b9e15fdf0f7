"""Who gets which batch, and when it is over. Without replicas."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from vllm_compat.extraction.dispatch import Stop, dispatch


class Told:
    """Answers at once; without `room` it is never ready, as an actor that a Ray cluster has no place for."""

    restarts = 0

    def __init__(self, name: str, *, room: bool) -> None:
        self.name, self._room = name, room

    def load(self) -> Future[Any]:
        return self._answer(f"facts of {self.name}") if self._room else Future()

    def call(self, name: str, *args: Any) -> Future[Any]:
        return self._answer(args[0])

    def _answer(self, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    def drain(self) -> None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...


def test_a_replica_that_finds_no_room_is_not_waited_for() -> None:
    """The cluster has room for one of two: the other one's load would never end, and neither would the run."""
    replicas = [Told("without", room=False), Told("with", room=True)]
    facts: list[Any] = []
    results: list[Any] = []
    last: list[Any] = []

    def go() -> None:
        batches: Any = iter(range(10))
        last.append(dispatch(replicas, batches, stop=Stop(), on_facts=facts.append, on_result=results.append))

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert facts == ["facts of with"]
    assert sorted(results) == list(range(10))
    assert last == [replicas[1]], "what describes the files must be a replica that is there"
