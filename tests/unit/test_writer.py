"""The write queue: bounded, and over after the first error. Without torch: what writes a file is replaced."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction import writer


class Disk:
    """Writes when it is let; fails for names that it does not like."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.written: list[str] = []
        self.error: OSError | None = None

    def save(self, path: Path, sample: Any) -> tuple[int, str]:
        assert self.open.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        self.written.append(path.name)
        return len(sample), "digest"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(writer, "save_sample", made.save)
    return made


def submitting(target: writer.Writer, name: str, size: int) -> threading.Thread:
    thread = threading.Thread(target=target.submit, args=(name, {}, size))
    thread.start()
    thread.join(0.2)
    return thread


def finish(target: writer.Writer, disk: Disk, files: int) -> None:
    """`close` drops what no thread has begun, so wait for the files first."""
    end = time.monotonic() + 30
    while len(disk.written) < files:
        assert time.monotonic() < end
        time.sleep(0.01)
    target.close()


def test_a_full_queue_makes_the_computing_wait(disk: Disk, tmp_path: Path) -> None:
    made = writer.Writer(tmp_path, threads=2, limit=100)
    made.submit("a", {}, 40)
    made.submit("b", {}, 60)
    waiting = submitting(made, "c", 1)
    assert waiting.is_alive(), "more than the limit is held"
    disk.open.release()
    waiting.join(30)
    assert not waiting.is_alive()
    assert made.waited > 0.1
    assert made.most <= 100
    for _ in range(2):
        disk.open.release()
    finish(made, disk, 3)
    assert sorted(disk.written) == ["a", "b", "c"]


def test_one_larger_than_the_limit_comes_alone(disk: Disk, tmp_path: Path) -> None:
    made = writer.Writer(tmp_path, threads=2, limit=100)
    made.submit("a", {}, 1)
    waiting = submitting(made, "large", 500)
    assert waiting.is_alive()
    for _ in range(2):
        disk.open.release()
    waiting.join(30)
    finish(made, disk, 2)
    assert disk.written == ["a", "large"]


def test_the_first_error_is_the_end(disk: Disk, tmp_path: Path) -> None:
    made = writer.Writer(tmp_path, threads=1, limit=100)
    first, second = made.submit("a", {}, 60), made.submit("b", {}, 40)
    failures: list[BaseException] = []

    def more() -> None:
        try:
            made.submit("c", {}, 60)
        except OSError as error:
            failures.append(error)

    waiting = threading.Thread(target=more)
    waiting.start()
    time.sleep(0.1)
    disk.error = OSError(28, "No space left on device")
    disk.open.release()
    waiting.join(30)
    assert [first.exception(30), second.exception(30), *failures] == [disk.error] * 3
    with pytest.raises(OSError, match="No space left"):
        made.submit("d", {}, 1)
    made.close()
    assert disk.written == []


def test_files_are_written_by_several_threads(disk: Disk, tmp_path: Path) -> None:
    made = writer.Writer(tmp_path, threads=3, limit=100)
    futures = [made.submit(str(number), {}, 1) for number in range(9)]
    for _ in futures:
        disk.open.release()
    assert [future.result(30) for future in futures] == [(0, "digest")] * 9
    made.close()
    assert sorted(disk.written) == [str(number) for number in range(9)]
    assert made.writing > 0
