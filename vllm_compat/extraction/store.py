"""Files of hidden states on a disk that may fail, fill up or lose its process at any moment.

A file has its name only when all of it is on the disk: it is written under a temporary name in the same folder,
synced, then renamed. speculators' trainer reads every file below a folder whose name ends in `pt`; neither temporary
nor quarantined names do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from vllm_compat.extraction.manifest import FileRecord

QUARANTINE = "quarantine"
CONFIG = "data_config.json"
DATA_FILE = re.compile(r"data_(0|[1-9]\d*)\.pt")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_CHUNK = 8 * 2**20
SCANNING_THREADS = 4


def data_file(number: int) -> str:
    """The name that v0.3.0's script gives to the file of that number."""
    return f"data_{number}.pt"


def number_of(name: str) -> int:
    """The number of a file of that name (`DATA_FILE`)."""
    return int(name[len("data_") : -len(".pt")])


class Sink:
    """A file that is only written to; counts and hashes what goes through. None: counts and hashes only."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        self.bytes += len(data)
        if self._file is not None:
            self._file.write(data)
        return len(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def write_atomic(path: Path, write: Callable[[Sink], object]) -> tuple[int, str]:
    """Let `write` fill `path`; returns its bytes and SHA-256. After any failure `path` is as it was before.

    The name itself is safe after a power failure only once `sync_folder` was called. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            sink = Sink(file)
            write(sink)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # "No space left on device" alone does not say which
        raise
    return sink.bytes, sink.sha256


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` safe against a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_sample(path: Path, sample: Mapping[str, Any]) -> tuple[int, str]:
    """Write a sample as v0.3.0's script does (`torch.save` of a dict); returns bytes and SHA-256."""
    import torch

    return write_atomic(path, lambda file: torch.save(dict(sample), file))


def sample_digest(sample: Mapping[str, Any]) -> str:
    """The SHA-256 that the sample's file would have."""
    import torch

    sink = Sink()
    torch.save(dict(sample), sink)
    return sink.sha256


def sha256_of(path: Path) -> str:
    """Of a whole file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(kw_only=True)
class Scan:
    """What is in a folder, against what its records promise. Names, without the folder."""

    good: dict[str, FileRecord] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # name -> what is wrong; the file is there
    missing: list[str] = field(default_factory=list)  # recorded, and not there
    unrecorded: list[str] = field(default_factory=list)  # of this set, but a kill came before its record
    foreign: list[str] = field(default_factory=list)  # data files whose number is not of this set
    temporary: list[str] = field(default_factory=list)  # half-written when their process ended


def scan(
    folder: Path,
    records: Mapping[str, FileRecord],
    names: Iterable[str],
    *,
    contents: bool = True,
    tell: Callable[[int], object] = lambda size: None,
) -> Scan:
    """Compare the folder with the records of the files that it should have (`names`).

    `contents`: read every file and compare its SHA-256; else only its size. `tell` is given the bytes of each file that
    has been read. Nothing is changed.
    """
    wanted, found, result = set(names), set(), Scan()
    with os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                result.temporary.append(entry.name)
            elif DATA_FILE.fullmatch(entry.name):
                found.add(entry.name)
    result.foreign = sorted(found - wanted, key=number_of)
    result.unrecorded = sorted((found & wanted) - records.keys(), key=number_of)
    recorded = sorted(wanted & records.keys(), key=number_of)
    result.missing = [name for name in recorded if name not in found]
    there = [name for name in recorded if name in found]

    def fault(name: str) -> str | None:
        said = _fault(folder / name, records[name], contents)
        tell(records[name].bytes)
        return said

    with ThreadPoolExecutor(max_workers=SCANNING_THREADS) as pool:
        for name, said in zip(there, pool.map(fault, there), strict=True):
            if said is None:
                result.good[name] = records[name]
            else:
                result.broken[name] = said
    return result


def _fault(path: Path, record: FileRecord, contents: bool) -> str | None:
    """What is wrong with a file that is there; None if nothing."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size} bytes, {record.bytes} were written"
        if contents and sha256_of(path) != record.sha256:
            return "has other contents than were written (SHA-256)"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def mend(folder: Path, found: Scan) -> None:
    """Put broken and foreign files aside, where no trainer reads them, and remove what was never finished."""
    for name in (*found.broken, *found.foreign):
        quarantine(folder, name)
    for name in found.temporary:
        (folder / name).unlink(missing_ok=True)


def quarantine(folder: Path, name: str) -> Path:
    """Move a file to the folder's quarantine; returns where it is now. Nothing there is ever overwritten."""
    aside = folder / QUARANTINE
    aside.mkdir(exist_ok=True)
    number = 0
    while (place := aside / f"{name}.{number}.broken").exists():
        number += 1
    os.replace(folder / name, place)
    return place
