"""What a folder of hidden states says about itself: `manifest.json` and `manifest.files.jsonl`.

The format is described in `docs/extraction-format.md`. To check a folder: `read_manifest`, `read_records`, and
`store.scan`. Only the standard library is imported here.

- `manifest.json` is the header: what was asked for, what the states are, with which releases and patches, and whether
  the set is complete. It is small and always replaced as a whole.
- `manifest.files.jsonl` has one line for each file: its name, sample, tokens, bytes and SHA-256. Lines are appended
  while the run goes on, each after its file is safely on the disk, so after a kill at any moment a line never promises
  more than there is. A later line about a file stands in place of an earlier one. When the set is complete, the lines
  are sorted by sample.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from vllm_compat.extraction.store import sync_folder, write_atomic

HEADER, JOURNAL, LOCK = "manifest.json", "manifest.files.jsonl", ".extract.lock"
SCHEMA = 1
_LONGEST_LINE = 4096


class ManifestError(ValueError):
    """The folder's manifest is broken, of a newer schema, or of another extraction than the one that is asked for; or
    another process holds the folder, or nobody can."""


class FileRecord(NamedTuple):
    """One line of `manifest.files.jsonl`: a file that was written whole."""

    file: str  # "data_7.pt"
    sample: int  # number of the sample in the preprocessed data set, from 0; the file's number less `start_idx`
    batch: int  # number of the call of `generate` it came from
    tokens: int
    bytes: int
    sha256: str  # of the whole file


@dataclass(kw_only=True)
class Manifest:
    """`manifest.json`."""

    request: dict[str, Any]  # decides what the tensors are; a resumed run must ask for the same
    states: dict[str, Any] | None = None  # layer_ids, hidden_size, dtype; None until a model has been loaded
    data: dict[str, Any] = field(default_factory=dict)  # where the prompts came from, for people
    versions: dict[str, str] = field(default_factory=dict)  # by module, of the last session
    patches: list[str] = field(default_factory=list)  # ids of the patches applied in the last session
    sessions: list[dict[str, Any]] = field(default_factory=list)  # one for each start of the command
    files: dict[str, Any] | None = None  # count, tokens, bytes, sha256 of the journal; None until complete

    @property
    def complete(self) -> bool:
        return self.files is not None

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "complete": self.complete, **asdict(self)}


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's header; None if it has none (never extracted to, or by the official script).

    Raises ManifestError for one that cannot be read or is of a newer schema.
    """
    path = folder / HEADER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content["schema"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path} is not the manifest of an extraction ({error}): move it away") from None
    if schema != SCHEMA:
        raise ManifestError(f"{path} has schema {schema}, this vllm_compat reads {SCHEMA}: use the one that wrote it")
    if not isinstance(content.get("request"), dict):
        raise ManifestError(f"{path} is not the manifest of an extraction (it has no request): move it away")
    known = {each.name for each in fields(Manifest)}
    return Manifest(**{name: value for name, value in content.items() if name in known})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the header as a whole."""
    text = json.dumps(manifest.as_dict(), indent=2, sort_keys=True) + "\n"
    write_atomic(folder / HEADER, lambda file: file.write(text.encode()))
    sync_folder(folder)


def read_records(folder: Path) -> dict[str, FileRecord]:
    """Every file that was written whole, by name: the last line about it.

    A last line without its end was cut by a kill and counts as not written. Raises ManifestError for any other line
    that is not a record.
    """
    path = folder / JOURNAL
    records: dict[str, FileRecord] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return records
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line's end is empty or was cut
        try:
            record = FileRecord(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ManifestError(f"{path}, line {number} is not a record of a file ({error}): {line[:80]!r}") from None
        records[record.file] = record
    return records


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What two requests (or two `states`) do not agree on, one text each."""
    return [
        f"{name} is {wanted.get(name)!r}, the folder has {found.get(name)!r}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


class Journal:
    """The lines of `manifest.files.jsonl`, for the one process that may add to them."""

    def __init__(self, folder: Path, records: dict[str, FileRecord] | None = None) -> None:
        """`records`: what `read_records` says, if it was read already."""
        self._folder = folder
        self.records = read_records(folder) if records is None else records
        self._file = (folder / JOURNAL).open("ab")
        with (folder / JOURNAL).open("rb") as file:  # a cut last line would swallow the next one
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LONGEST_LINE))
            end = file.read()
        os.truncate(folder / JOURNAL, size - len(end) + end.rfind(b"\n") + 1)
        sync_folder(folder)

    def add(self, records: Iterable[FileRecord]) -> None:
        """Append, and return when the lines are on the disk. The files must be there already."""
        new = list(records)
        try:
            self._file.write(b"".join(_line(each) for each in new))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            error.filename = str(self._folder / JOURNAL)  # "No space left on device" alone does not say which
            raise
        self.records.update({each.file: each for each in new})

    def keep(self, names: Iterable[str]) -> None:
        """Forget all other files."""
        self.records = {name: self.records[name] for name in names}
        self._file.close()
        self._rewrite()
        self._file = (self._folder / JOURNAL).open("ab")

    def close(self) -> None:
        self._file.close()

    def finish(self) -> dict[str, Any]:
        """Sort the lines by sample, so that a resumed run has the lines of an unbroken one; returns their sum."""
        self._file.close()
        size, digest = self._rewrite()
        return {
            "journal": JOURNAL,
            "journal_bytes": size,
            "journal_sha256": digest,
            "count": len(self.records),
            "tokens": sum(each.tokens for each in self.records.values()),
            "bytes": sum(each.bytes for each in self.records.values()),
        }

    def _rewrite(self) -> tuple[int, str]:
        ordered = sorted(self.records.values(), key=lambda each: each.sample)
        parts = (b"".join(map(_line, ordered[start : start + 1000])) for start in range(0, len(ordered), 1000))
        written = write_atomic(self._folder / JOURNAL, lambda file: file.writelines(parts))
        sync_folder(self._folder)
        return written


def _line(record: FileRecord) -> bytes:
    """By hand, since `json.dumps` takes minutes for a million files. No value needs escaping."""
    return (
        f'{{"file": "{record.file}", "sample": {record.sample}, "batch": {record.batch}, "tokens": {record.tokens}, '
        f'"bytes": {record.bytes}, "sha256": "{record.sha256}"}}\n'
    ).encode()


class FolderLock:
    """Held while a run writes to the folder: two at once would mend what the other is writing.

    The lock is the kernel's (flock), so it goes with its process, however that ends. The file stays: deleting it would
    race with the next run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._fd = -1

    def __enter__(self) -> FolderLock:
        # Forked processes, as those that tokenize, would keep a killed run's lock for as long as they go on.
        os.register_at_fork(after_in_child=self._forget)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 200).decode(errors="replace").strip()
            self._forget()
            raise ManifestError(
                f"{self._path.parent} is being extracted to by another process ({holder or 'not known which'}): wait "
                "for it, or end it; then the same command goes on where it was"
            ) from None
        except OSError as error:
            self._forget()
            raise ManifestError(
                f"{self._path.parent}: its file system cannot lock files ({error.strerror}): mount it with flock "
                "(Lustre: -o flock), or name another --output-dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._forget()

    def _forget(self) -> None:
        """Close the file; the lock goes when the last process has."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
