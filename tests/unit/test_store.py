"""Files that are whole or not there, the journal that never promises more, and the scan that finds the difference."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_compat.extraction import manifest, store
from vllm_compat.extraction.manifest import (
    JOURNAL,
    FileRecord,
    FolderLock,
    Journal,
    Manifest,
    ManifestError,
    differences,
    read_manifest,
    read_records,
    write_manifest,
)


def make(folder: Path, number: int, content: bytes | None = None) -> FileRecord:
    content = f"content of {number}".encode() * 10 if content is None else content
    size, digest = store.write_atomic(folder / store.data_file(number), lambda file: file.write(content))
    return FileRecord(
        file=store.data_file(number), sample=number, batch=number // 2, tokens=7, bytes=size, sha256=digest
    )


def test_written_whole(tmp_path: Path) -> None:
    record = make(tmp_path, 3, b"abc")
    assert (record.bytes, record.sha256) == (3, hashlib.sha256(b"abc").hexdigest())
    assert (tmp_path / "data_3.pt").read_bytes() == b"abc"
    assert store.sha256_of(tmp_path / "data_3.pt") == record.sha256


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 0, b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    def write(file: store.Sink) -> None:
        file.write(b"new, " * 100_000)
        if failing == "write":
            fail()

    if failing != "write":
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=r"No space left on device: .*data_0\.pt"):
        store.write_atomic(tmp_path / "data_0.pt", write)
    assert [path.name for path in tmp_path.iterdir()] == ["data_0.pt"]
    assert (tmp_path / "data_0.pt").read_bytes() == b"old"


def test_scan_and_mend(tmp_path: Path) -> None:
    records = {record.file: record for record in (make(tmp_path, number) for number in range(6))}
    names = [store.data_file(number) for number in range(8)]
    (tmp_path / "data_1.pt").unlink()
    with (tmp_path / "data_2.pt").open("r+b") as file:
        file.truncate(20)
    with (tmp_path / "data_3.pt").open("r+b") as file:
        file.write(b"C")  # the size stays
    make(tmp_path, 7)
    make(tmp_path, 12)
    (tmp_path / ".data_6.pt.0a1b2c3d.tmp").write_bytes(b"half")
    (tmp_path / "data_007.pt").write_bytes(b"somebody else's name")

    found = store.scan(tmp_path, records, names)
    assert sorted(found.good) == ["data_0.pt", "data_4.pt", "data_5.pt"]
    assert found.broken == {
        "data_2.pt": f"has 20 bytes, {records['data_2.pt'].bytes} were written",
        "data_3.pt": "has other contents than were written (SHA-256)",
    }
    assert found.missing == ["data_1.pt"]
    assert found.unrecorded == ["data_7.pt"]
    assert found.foreign == ["data_12.pt"]
    assert found.temporary == [".data_6.pt.0a1b2c3d.tmp"]
    assert sorted(store.scan(tmp_path, records, names, contents=False).broken) == ["data_2.pt"]

    store.mend(tmp_path, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("data_0.pt", "data_007.pt", "data_4.pt", "data_5.pt", "data_7.pt", "quarantine")
    ]
    aside = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert aside == ["data_12.pt.0.broken", "data_2.pt.0.broken", "data_3.pt.0.broken"]
    assert not any(name.endswith("pt") for name in aside), "the trainer would read it"

    make(tmp_path, 2, b"broken again")
    assert store.quarantine(tmp_path, "data_2.pt").name == "data_2.pt.1.broken"


def test_a_file_that_cannot_be_read_is_broken(tmp_path: Path) -> None:
    record = make(tmp_path, 0)
    (tmp_path / "data_0.pt").unlink()
    (tmp_path / "data_0.pt").mkdir()
    found = store.scan(tmp_path, {record.file: record}, [record.file], contents=False)
    assert list(found.broken) == ["data_0.pt"]


def test_the_journal_survives_being_cut_anywhere(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    records = [make(tmp_path, number) for number in (2, 0, 1)]
    journal.add(records[:1])
    journal.add(records[1:])
    journal.close()
    whole = (tmp_path / JOURNAL).read_bytes()
    ends = [number for number, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in sorted({*range(0, len(whole), 7), *ends, *(end - 1 for end in ends)}):
        (tmp_path / JOURNAL).write_bytes(whole[:cut])
        expected = {record.file for record, end in zip(records, ends, strict=True) if end <= cut}
        assert set(read_records(tmp_path)) == expected
        journal = Journal(tmp_path)
        journal.add([record for record in records if record.file not in expected])
        summary = journal.finish()
        lines = (tmp_path / JOURNAL).read_bytes()
        assert [json.loads(line)["sample"] for line in lines.splitlines()] == [0, 1, 2]
        assert summary["journal_sha256"] == hashlib.sha256(lines).hexdigest()
        assert (summary["count"], summary["tokens"]) == (3, 21)


def test_a_line_is_what_json_would_write() -> None:
    record = FileRecord(file="data_7.pt", sample=7, batch=0, tokens=512, bytes=4198402, sha256="ab" * 32)
    assert manifest._line(record) == json.dumps(record._asdict()).encode() + b"\n"


def test_the_last_line_about_a_file_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add([make(tmp_path, 0, b"first")])
    again = make(tmp_path, 0, b"second")
    journal.add([again])
    journal.close()
    assert read_records(tmp_path) == {"data_0.pt": again}


def test_a_journal_that_was_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"file": "data_0.pt"}\n')
    with pytest.raises(ManifestError, match=r"line 1 is not a record of a file"):
        read_records(tmp_path)


def test_manifest_there_and_back(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    written = Manifest(request={"seq_length": 64, "layer_ids": None}, patches=["a"], sessions=[{"outcome": "running"}])
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert (content["schema"], content["complete"]) == (1, False)
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "schema": 2}))
    with pytest.raises(ManifestError, match="has schema 2, this vllm_compat reads 1"):
        read_manifest(tmp_path)
    for text in ("{", '{"schema": 1}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ManifestError, match="not the manifest of an extraction"):
            read_manifest(tmp_path)


def test_differences_are_named() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}) == ["b is 2, the folder has 3"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    code = f"""
import pathlib
from vllm_compat.extraction.manifest import FolderLock
with FolderLock(pathlib.Path({str(tmp_path)!r})):
    print("has it", flush=True)
    input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(ManifestError, match=f"by another process .process {other.pid} on "), FolderLock(tmp_path):
            pass
        other.kill()
    with FolderLock(tmp_path):  # the kernel has released it
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre, mounted without -o flock."""

    def flock(fd: int, _operation: int) -> None:
        handles.append(fd)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    handles: list[int] = []
    monkeypatch.setattr(fcntl, "flock", flock)
    told = rf"{tmp_path}: its file system cannot lock files .Function not implemented.: mount it with flock"
    with pytest.raises(ManifestError, match=told), FolderLock(tmp_path):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handles[0])


def test_only_the_standard_library() -> None:
    code = "import sys, vllm_compat.extraction.manifest; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """datasets' tokenizing processes, and its manager, outlive a killed run."""
    read, write = os.pipe()
    with FolderLock(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(write, b"forked")
            time.sleep(60)
            os._exit(0)
        assert os.read(read, 6) == b"forked"
    try:
        with FolderLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
