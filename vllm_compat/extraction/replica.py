"""One replica: loads the model, computes batches, writes their files. The same on one machine and on a Ray cluster.

A batch is always computed in one call of `generate` with the same prompts, whenever and wherever that happens: which
prompts share a step decides how kernels round, so a sample's bytes must not depend on where a run was broken. If one
file of a batch is missing, the whole batch is computed again.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.manifest import HEADER, FileRecord
from vllm_compat.extraction.store import data_file, sample_digest, sync_folder
from vllm_compat.extraction.writer import Writer

if TYPE_CHECKING:
    import numpy

LOST = 75  # exit code of a replica whose workers are gone (EX_TEMPFAIL): it is to be replaced
SEEN_WITHIN = 30.0  # seconds after which a network file system shows what another machine wrote


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """Plain data: travels to another process or machine."""

    target_model_path: str
    output_dir: str
    session: str  # id of the run, as in the folder's manifest
    layer_ids: tuple[int, ...] | None
    seq_length: int
    batch_size: int
    start_idx: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    writers: int
    write_queue: int  # bytes
    command: tuple[str, ...]
    engine: str
    verbose: bool


@dataclass(frozen=True, kw_only=True)
class Batch:
    number: int
    first: int  # number of its first sample
    input_ids: list[numpy.ndarray]  # int64 [tokens] each
    loss_mask: list[numpy.ndarray]
    known: Mapping[int, str]  # sample -> SHA-256 of its file, which is there: computed again, not written again


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a replica says about itself. All of a run's replicas must agree, but for where they are."""

    states: dict[str, Any]
    versions: dict[str, str]
    patches: list[str]
    fingerprint: str
    workers: int
    place: str  # process and machine

    def disagrees(self, other: Facts) -> list[str]:
        names = ("states", "versions", "patches", "fingerprint")
        return [
            f"{name}: {getattr(self, name)} in {self.place}, {getattr(other, name)} in {other.place}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    number: int
    records: list[FileRecord]  # of the files that were written, all of them safely on the disk
    tokens: int  # of the whole batch
    differing: list[str]  # known files whose states came out otherwise this time
    generating: float  # seconds
    waiting: float  # seconds for the disk (back-pressure)
    facts: Facts = field(repr=False)


class Replica:
    """Raises what the engine raises; errors of the folder are OSErrors."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.output_dir)
        self._check_folder()
        module, _, name = settings.engine.partition(":")
        self._kind: Any = getattr(import_module(module), name)
        self._engine: Any = None
        self._one_at_a_time = threading.Lock()
        self._draining = False
        self._writer = Writer(self._folder, threads=settings.writers, limit=settings.write_queue)

    def load(self) -> Facts:
        """Load the model; takes minutes."""
        import torch  # noqa: F401 - now, so that the first batch does not pay for it

        self._engine = self._kind(self._settings)
        return self.facts()

    def facts(self) -> Facts:
        return Facts(
            states=self._engine.states,
            versions=self._engine.versions,
            patches=self._engine.patches,
            fingerprint=self._engine.fingerprint,
            workers=self._engine.workers,
            place=f"process {os.getpid()} on {socket.gethostname()}",
        )

    def _check_folder(self) -> None:
        """The run has just written its session to the manifest. Whoever does not see it sees another folder."""
        path, end = self._folder / HEADER, time.monotonic() + SEEN_WITHIN
        while True:
            try:
                if json.loads(path.read_text(encoding="utf-8"))["sessions"][-1]["id"] == self._settings.session:
                    return
                why = "it has the manifest of another run"
            except (OSError, ValueError, LookupError) as error:
                why = str(error)
            if time.monotonic() > end:
                raise OSError(
                    f"{socket.gethostname()} does not see the output folder {self._folder} as the run does ({why}): "
                    "give a folder on a file system that all machines share, by the same path"
                )
            time.sleep(0.2)

    def drain(self) -> None:
        """Compute nothing more; what has been computed is still written."""
        self._draining = True

    def compute(self, batch: Batch) -> Pending | None:
        """Compute the batch and hand its files to the writers; None when draining.

        Returns when the files are in the queue. If a worker of the engine has died, this process ends.
        """
        import torch

        with self._one_at_a_time:
            if self._draining:
                return None
            ids = [torch.from_numpy(each.copy()) for each in batch.input_ids]
            begin = time.perf_counter()
            try:
                results = self._engine.generate(ids)
            except Exception:
                if self._engine.lost:
                    _end_here()
                raise
            seconds = time.perf_counter() - begin
            before = self._writer.waited
            pending = self._submit(batch, ids, results)
            return Pending(self, batch, seconds, self._writer.waited - before, *pending)

    def _submit(self, batch: Batch, ids: list[Any], results: list[Any]) -> tuple[dict[int, Any], list[int], list[str]]:
        import torch

        files: dict[int, Future[tuple[int, str]]] = {}
        lengths, differing = [], []
        for offset in range(len(ids)):
            result, results[offset] = results[offset], None  # the queue's limit holds only if nobody else keeps it
            length = min(len(ids[offset]), self._settings.seq_length - 1)
            if not torch.equal(torch.as_tensor(result["input_ids"]), ids[offset][:length]):
                raise RuntimeError(f"sample {batch.first + offset} came back with other token ids than went in")
            sample = {
                "input_ids": result["input_ids"],
                "hidden_states": [layer.contiguous() for layer in result["hidden_states"]],
                # The generator leaves room for one more token; the mask follows the ids.
                "loss_mask": torch.from_numpy(batch.loss_mask[offset][:length].copy()),
            }
            lengths.append(length)
            number = batch.first + offset
            name = data_file(self._settings.start_idx + number)
            if number in batch.known:
                if sample_digest(sample) != batch.known[number]:
                    differing.append(name)
            else:
                size = sum(layer.nbytes for layer in sample["hidden_states"]) + 16 * length
                files[offset] = self._writer.submit(name, sample, size)
        return files, lengths, differing

    def settle(self, batch: Batch, files: dict[int, Any], lengths: list[int]) -> list[FileRecord]:
        """Wait until the files are safely on the disk."""
        written = {offset: future.result() for offset, future in files.items()}
        sync_folder(self._folder)
        return [
            FileRecord(
                file=data_file(self._settings.start_idx + batch.first + offset),
                sample=batch.first + offset,
                batch=batch.number,
                tokens=lengths[offset],
                bytes=size,
                sha256=digest,
            )
            for offset, (size, digest) in written.items()
        ]

    def describe(self, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Content of `data_config.json`. The last thing a replica does: its model is gone afterwards."""
        self.close()
        content: dict[str, Any] = self._kind.describe(self._settings, states, data)
        return content

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        self._writer.close()


class Pending:
    """A batch whose files are being written."""

    def __init__(
        self,
        replica: Replica,
        batch: Batch,
        generating: float,
        waiting: float,
        files: dict[int, Any],
        lengths: list[int],
        differing: list[str],
    ) -> None:
        self._replica, self._batch, self._files, self._lengths = replica, batch, files, lengths
        self._differing, self._generating, self._waiting = differing, generating, waiting
        self._facts = replica.facts()

    def result(self) -> BatchResult:
        records = self._replica.settle(self._batch, self._files, self._lengths)
        return BatchResult(
            number=self._batch.number,
            records=records,
            tokens=sum(self._lengths),
            differing=self._differing,
            generating=self._generating,
            waiting=self._waiting,
            facts=self._facts,
        )


def _end_here() -> None:
    """Say why, and end this process: whoever started it starts another."""
    import traceback

    traceback.print_exc()
    os._exit(LOST)
