"""Copies of a step's rows to the host, beside the layers that follow, and what is noted of each row on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_compat.patches.worker.call import Span
from vllm_compat.patches.worker.rows import HostRows

if TYPE_CHECKING:
    import torch


class Copies:
    """On a GPU with page-locked rows they run on a stream of their own; elsewhere each is done when it is added."""

    _stream: torch.cuda.Stream | None = None

    def begin_call(self, host: HostRows, like: torch.Tensor) -> None:
        """host: where the rows of the call go; like: some of them, on their device."""
        import torch

        assert host.rows is not None
        self._host = host
        if not host.is_pinned:
            self._stream = None
        elif self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        # Of each row of the call; what no step fills in stays NaN, which is an error.
        self._low, self._high = torch.full((2, *host.rows.shape[:2]), float("nan"), device=like.device)
        self._positions: torch.Tensor | None = None

    def wait(self) -> None:
        """Until all copies have ended: before the rows are read, before their memory goes, and before another step's
        copies begin, so device memory holds the rows of two steps at most."""
        if self._stream is not None:
            self._stream.synchronize()

    def add(self, layer: int, rows: torch.Tensor, spans: Sequence[Span]) -> None:
        """rows: the step's ``[tokens, hidden]`` of the call's ``layer``-th layer; spans: where they go."""
        import torch

        smallest, largest = torch.aminmax(rows, dim=-1)  # a NaN in the row makes both NaN
        _place(smallest, spans, self._low[layer])
        _place(largest, spans, self._high[layer])
        assert self._host.rows is not None
        if self._stream is None:
            _place(rows, spans, self._host.rows[layer])
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _place(rows, spans, self._host.rows[layer], non_blocking=True)
        rows.record_stream(self._stream)

    def note_positions(self, positions: torch.Tensor, spans: Sequence[Span]) -> None:
        """positions: those of a step's rows ``[tokens or more]``, which the runner will write over in the next step."""
        import torch

        assert self._host.rows is not None
        if self._positions is None:
            self._positions = torch.full(self._host.rows.shape[1:2], -1, device=positions.device)
        _place(positions, spans, self._positions)

    def positions(self) -> torch.Tensor | None:
        """Those noted in this call, of each row ``[tokens]``, on the CPU."""
        return None if self._positions is None else self._positions.cpu()

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the copies; the smallest and the largest value of each row ``[layers, tokens]``, on the CPU."""
        self.wait()
        return self._low.cpu(), self._high.cpu()


def _place(values: torch.Tensor, spans: Sequence[Span], into: torch.Tensor, *, non_blocking: bool = False) -> None:
    """What a step has for each of its tokens goes to the tokens' places in the call."""
    for source, target, count in spans:
        into[target : target + count].copy_(values[source : source + count], non_blocking=non_blocking)
