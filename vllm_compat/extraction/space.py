"""How much disk an extraction needs, told before the model loads and refused when it is not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4096  # what file systems round up to
ID_AND_MASK = 16  # bytes of a token: its id and its mask are int64
FILE_OVERHEAD = 2048  # torch's archive, and 512 bytes for each of its tensors (measured: tests/parts)
TENSOR_OVERHEAD = 512
JOURNAL_LINE = 256
AUTO_LAYERS = 4  # what v0.3.0 chooses without --layer-ids


class SpaceError(OSError):
    """The files do not fit."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is still to be written, and what is free."""

    files: int
    tokens: int
    bytes: int
    largest: int  # bytes of the largest file
    free: int
    free_files: int | None  # None: the file system does not count them

    def as_text(self) -> str:
        each = self.bytes / max(1, self.tokens)
        return (
            f"{self.files} files with {self.tokens} tokens need {size(self.bytes)} of disk ({each / 1024:.1f} KiB per "
            f"token, the largest file {size(self.largest)}); {size(self.free)} are free"
        )

    def check(self, folder: Path) -> None:
        """Raise SpaceError if it does not fit."""
        if self.bytes > self.free:
            raise SpaceError(
                f"{folder}: {self.as_text()}. {size(self.bytes - self.free)} are missing: make room, name another "
                "--output-dir, or extract fewer samples (--max-samples), shorter ones (--seq-length) or fewer layers "
                "(--layer-ids)"
            )
        if self.free_files is not None and self.files > self.free_files:
            raise SpaceError(
                f"{folder}: {self.files} files are to be written, the file system takes {self.free_files}. Name "
                "another --output-dir, or extract fewer samples (--max-samples)"
            )


def file_size(tokens: int, *, layers: int, hidden_size: int, itemsize: int = 2) -> int:
    """Bytes that a file of so many tokens takes, at most."""
    content = tokens * (layers * hidden_size * itemsize + ID_AND_MASK)
    whole = content + FILE_OVERHEAD + TENSOR_OVERHEAD * (layers + 2)
    return -(-whole // BLOCK) * BLOCK


def need(lengths: Iterable[int], folder: Path, *, layers: int, hidden_size: int, itemsize: int = 2) -> Need:
    """For files with so many tokens each. `folder`, or the nearest folder above that exists, tells what is free."""
    tokens = list(lengths)
    sizes = [file_size(each, layers=layers, hidden_size=hidden_size, itemsize=itemsize) for each in tokens]
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    room = os.statvfs(place)
    return Need(
        files=len(tokens),
        tokens=sum(tokens),
        bytes=sum(sizes) + JOURNAL_LINE * len(tokens) + BLOCK,
        largest=max(sizes, default=0),
        free=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
    )


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
