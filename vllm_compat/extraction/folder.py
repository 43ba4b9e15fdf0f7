"""The output folder of a run: what is asked for against what is there, and what is still to be done."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_compat.extraction.dataset import Samples
from vllm_compat.extraction.manifest import (
    FileRecord,
    Journal,
    Manifest,
    ManifestError,
    differences,
    read_manifest,
    read_records,
    write_manifest,
)
from vllm_compat.extraction.replica import Batch, BatchResult, Facts
from vllm_compat.extraction.store import DATA_FILE, Scan, data_file, mend, scan, write_atomic
from vllm_compat.extraction.streams import say

REPORT = "extract_report.json"
SHOWN = 5


@dataclass
class Work:
    """What is still to be done, by batch. A batch that lacks one file is computed as a whole."""

    batches: list[int]
    samples: list[int]  # whose files are missing
    known: dict[int, str] = field(default_factory=dict)  # sample -> SHA-256, for files that are there


class OutputFolder:
    """Between `begin` and `end` there is a session, and files may be added."""

    def __init__(self, path: Path, *, start_idx: int, batch_size: int) -> None:
        self.path = path
        self._start_idx, self._batch_size = start_idx, batch_size
        self.manifest = read_manifest(path) if path.is_dir() else None
        self._journal: Journal | None = None
        self._records: dict[str, FileRecord] = {}
        self.differing: list[str] = []

    def check_request(self, request: dict[str, Any]) -> None:
        """Raise ManifestError if the folder is of another extraction, or of none that has a manifest."""
        if self.manifest is None:
            there = [each for each in os.listdir(self.path) if DATA_FILE.fullmatch(each)] if self.path.is_dir() else []
            if there:
                raise ManifestError(
                    f"{self.path} has {len(there)} data files and no manifest, so another program wrote them and "
                    "nothing tells from what: name another --output-dir (a trainer reads folders below it too)"
                )
        elif found := differences(request, self.manifest.request):
            lines = [f"{self.path} is of another extraction, and a resumed run must ask for the same:"]
            raise ManifestError("\n  - ".join([*lines, *found]) + "\nName another --output-dir, or ask for the same.")

    def names(self, samples: int) -> list[str]:
        return [data_file(self._start_idx + number) for number in range(samples)]

    def scan(self, samples: int, *, contents: bool) -> Scan:
        """Compare files and records; changes nothing."""
        if not self.path.is_dir():
            return Scan()
        from tqdm import tqdm

        self._records = read_records(self.path)
        total = sum(record.bytes for record in self._records.values())
        with tqdm(total=total, desc="checking files", unit="B", unit_scale=True, delay=2, file=sys.stderr) as bar:
            return scan(self.path, self._records, self.names(samples), contents=contents, tell=bar.update)

    def work(self, found: Scan, samples: int) -> Work:
        there = {record.sample: record.sha256 for record in found.good.values()}
        missing = [number for number in range(samples) if number not in there]
        batches = sorted({number // self._batch_size for number in missing})
        rerun = {number for batch in batches for number in self.members(batch, samples)}
        return Work(batches, missing, {number: there[number] for number in sorted(rerun & there.keys())})

    def members(self, batch: int, samples: int) -> range:
        return range(batch * self._batch_size, min((batch + 1) * self._batch_size, samples))

    def batches(self, work: Work, samples: Samples) -> Iterator[Batch]:
        for number in work.batches:
            members = self.members(number, len(samples))
            ids, masks = samples.get(members.start, members.stop)
            known = {each: work.known[each] for each in members if each in work.known}
            yield Batch(number=number, first=members.start, input_ids=ids, loss_mask=masks, known=known)

    def begin(self, request: dict[str, Any], data: dict[str, Any], found: Scan) -> str:
        """Put the folder in order and note a session; returns its id. The folder is locked by the caller."""
        for name, why in [*found.broken.items()][:SHOWN]:
            say(f"{name} {why}: put aside, computed again")
        if found.foreign:
            say(f"{len(found.foreign)} data files are not of this set ({', '.join(found.foreign[:SHOWN])}): put aside")
        mend(self.path, found)
        self._journal = Journal(self.path, self._records)
        if self._journal.records.keys() != found.good.keys():
            self._journal.keep(found.good)
        self.manifest = self.manifest or Manifest(request=request)
        self.manifest.data = data
        self.manifest.files = None
        session = {"id": secrets.token_hex(8), "started": _now(), "ended": None, "outcome": "running", "files": 0}
        self.manifest.sessions.append(session)
        write_manifest(self.path, self.manifest)
        return str(session["id"])

    @property
    def _open(self) -> tuple[Manifest, Journal]:
        if self.manifest is None or self._journal is None:
            raise RuntimeError("no session has begun in this folder")
        return self.manifest, self._journal

    def note_facts(self, facts: Facts) -> None:
        """A replica has loaded the model. Raises ManifestError if its states would not be those of the folder."""
        manifest, journal = self._open
        if manifest.states is not None and (found := differences(facts.states, manifest.states)):
            raise ManifestError(f"{self.path}: this model's states are not those of the folder: {'; '.join(found)}")
        if journal.records and (found := differences(facts.versions, manifest.versions)):
            say(f"warning: the files that are there are of other releases ({'; '.join(found)}): bytes may differ")
        manifest.states, manifest.versions, manifest.patches = facts.states, facts.versions, facts.patches
        manifest.sessions[-1] |= {"versions": facts.versions, "workers": facts.workers}
        write_manifest(self.path, manifest)

    def add(self, result: BatchResult) -> None:
        """A batch's files are on the disk."""
        manifest, journal = self._open
        journal.add(result.records)
        manifest.sessions[-1]["files"] += len(result.records)
        self.differing += result.differing

    def end(self, outcome: str, *, places: Iterable[str] = ()) -> None:
        """Close the session; "complete" closes the set too."""
        manifest, journal = self._open
        if outcome == "complete":
            manifest.files = journal.finish()
        else:
            with contextlib.suppress(OSError):  # a full disk: lines that could not be written are tried once more
                journal.close()
        manifest.sessions[-1] |= {"ended": _now(), "outcome": outcome, "replicas": list(places)}
        with contextlib.suppress(OSError) if outcome == "failed" else contextlib.nullcontext():
            write_manifest(self.path, manifest)


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2)
    write_atomic(path, lambda file: file.write(text.encode()))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
