"""The book of one call: which rows are expected, which have come, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_compat.patches.worker.labels import Label


class Span(NamedTuple):
    """``count`` rows of a step, from row ``source`` on, go to row ``target`` of the call on."""

    source: int
    target: int
    count: int


class CallBook:
    """Places every labelled row of every step at its request and position.

    Rows are addressed by position, so chunks may come in any order of requests, over any number of steps, and a request
    that is preempted and computed again overwrites its own rows.
    """

    def __init__(self, requests: Sequence[tuple[str, int]]) -> None:
        """requests: id and number of prompt tokens of each, in the order in which rows are handed over."""
        self.requests = list(requests)
        self.tokens = sum(count for _, count in self.requests)
        self._length = dict(self.requests)
        if len(self._length) != len(self.requests):
            raise ValueError("vllm_compat: request ids of one call are not unique")
        self._offset: dict[str, int] = {}
        offset = 0
        for request_id, count in self.requests:
            self._offset[request_id] = offset
            offset += count
        self._computed = dict.fromkeys(self._length, 0)

    def place(self, labels: Sequence[Label]) -> list[Span]:
        """Where the rows of a step go; neighbours that stay neighbours are one span.

        Raises:
            RuntimeError: rows of an unknown request, beyond a prompt's end, or with a gap before them.
        """
        spans: list[Span] = []
        source = 0
        for request_id, position, count in labels:
            name = self.name(request_id)
            if request_id not in self._length:
                raise RuntimeError(f"vllm_compat: a step computed rows of {request_id}, which is not of this call")
            length, computed = self._length[request_id], self._computed[request_id]
            if position + count > length:
                raise RuntimeError(f"vllm_compat: {name}: expected {length} rows, got {position + count}")
            if position > computed:
                raise RuntimeError(
                    f"vllm_compat: {name}: rows {computed} to {position - 1} were skipped (a prefix cache was read?)"
                )
            self._computed[request_id] = position + count
            target = self._offset[request_id] + position
            if spans and spans[-1].target + spans[-1].count == target:
                spans[-1] = Span(spans[-1].source, spans[-1].target, spans[-1].count + count)
            else:
                spans.append(Span(source, target, count))
            source += count
        return spans

    def check_complete(self) -> None:
        """Raises RuntimeError: a prompt's rows have not all come."""
        for request_id, length in self.requests:
            if self._computed[request_id] != length:
                raise RuntimeError(
                    f"vllm_compat: {self.name(request_id)}: expected {length} rows, got {self._computed[request_id]}"
                )

    def owner(self, row: int) -> tuple[str, int]:
        """Name and position of the prompt token behind row ``row`` of the call."""
        for request_id, length in self.requests:
            if row < length:
                return self.name(request_id), row
            row -= length
        raise IndexError(row)

    def rows_of_each(self) -> Iterator[tuple[str, slice]]:
        """Name and rows of each prompt."""
        for request_id, length in self.requests:
            offset = self._offset[request_id]
            yield self.name(request_id), slice(offset, offset + length)

    def name(self, request_id: str) -> str:
        index = next((i for i, (known, _) in enumerate(self.requests) if known == request_id), None)
        return f"request {request_id}" if index is None else f"prompt {index} (request {request_id})"
