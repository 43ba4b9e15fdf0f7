"""For the tests of `extract` without vLLM: an engine that computes like a model whose rounding depends on who is in the
batch, a replica in this process, and runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from vllm_compat.extraction import extract, model, processes
from vllm_compat.extraction.dispatch import Stop
from vllm_compat.extraction.report import Report
from vllm_compat.extraction.settings import Settings

LENGTHS = [5, 9, 40, 7, 3, 12, 1, 22, 8, 30, 6]
SEQ_LENGTH = 32
BATCH = 3
WIDTH = 8
LAYERS = (1, 3)


class FakeEngine:
    """Its states follow from the prompt, its position, the layer, and (like real rounding) from the whole batch."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.states = {"layer_ids": list(LAYERS), "hidden_size": WIDTH, "dtype": "torch.bfloat16"}
        self.versions = {"vllm": "0.0"}
        self.patches = ["a-patch"]
        self.fingerprint = "0123"
        self.workers = settings.tensor_parallel_size
        self.lost = False

    def generate(self, prompts: list[Any]) -> list[dict[str, Any]]:
        import torch

        self._do_as_told(prompts)
        mixed = sum(int(each.sum()) for each in prompts) % 97
        results = []
        for ids in prompts:
            cut = ids[: self.settings.seq_length - 1]
            rows = (cut.unsqueeze(1) * torch.arange(1, WIDTH + 1) + mixed) % 251
            states = [(rows + layer).to(torch.bfloat16) for layer in LAYERS]
            results.append({"input_ids": cut, "hidden_states": states, "loss_mask": None})
        return results

    def _do_as_told(self, prompts: list[Any]) -> None:
        """A file `PROMPT.told` in the model's folder says what to do when a batch begins with that prompt."""
        told = Path(self.settings.target_model_path) / f"{int(prompts[0][0])}.told"
        if not told.exists():
            return
        what, _, argument = told.read_text().partition(" ")
        if what == "slow":
            time.sleep(float(argument))
        elif what == "die":  # so many times
            left = int(argument) - 1
            told.write_text(f"die {left}") if left else told.unlink()
            os.kill(os.getpid(), 9)
        elif what == "lose":  # a worker of the engine ends, once
            told.unlink()
            self.lost = True
            raise RuntimeError("a worker process has ended")
        elif what == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(argument), resource.RLIM_INFINITY))
        elif what == "fail":
            raise ValueError(argument)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def describe(settings: Any, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        return {"hidden_states": states, "data": data, "command": list(settings.command)}


class Rows:
    """As much of a data set as is read."""

    def __init__(self, lengths: list[int]) -> None:
        import numpy

        starts = [1000 * number + 7 for number in range(len(lengths))]
        self.ids = [numpy.arange(start, start + each) for start, each in zip(starts, lengths, strict=True)]

    def __getitem__(self, part: slice) -> dict[str, Any]:
        return {"input_ids": self.ids[part], "loss_mask": [each % 2 for each in self.ids[part]]}


def samples(lengths: list[int], seq_length: int) -> Any:
    import numpy

    from vllm_compat.extraction.dataset import Samples, add_prompt

    rows, digest = Rows(lengths), hashlib.sha256()
    for ids in rows.ids:
        add_prompt(digest, ids[: seq_length - 1], ids[: seq_length - 1] % 2)
    cut = numpy.array([min(each, seq_length - 1) for each in lengths], dtype=numpy.int64)
    return Samples(rows, cut, digest.hexdigest())


def settings_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **always: Any) -> Callable[..., Settings]:
    """Build settings of a run with the fake engine: no model to look at, no data to preprocess."""
    (folder / "model").mkdir()
    monkeypatch.setattr(model, "look_at", lambda path: model.Model(WIDTH, "model's hash"))
    prompts = samples(LENGTHS, SEQ_LENGTH)
    monkeypatch.setattr(extract, "load_samples", lambda settings, **known: (prompts, "counted"))

    def build(**given: Any) -> Settings:
        asked = {
            "target_model_path": str(folder / "model"),
            "train_data_path": "sharegpt",
            "output_dir": folder / "out",
            "token_freq_path": folder / "token_freq.pt",
            "seq_length": SEQ_LENGTH,
            "batch_size": BATCH,
            "layer_ids": LAYERS,
            "engine": "fakes:FakeEngine",
        }
        return Settings(**{**asked, **always, **given})

    return build


def run(settings: Settings) -> Report:
    report = Report(folder=str(settings.output_dir))
    with mock.patch.object(sys, "argv", ["extract", "--flag"]):
        extract.run(settings, report, Stop())
    return report


def unbroken(settings: Settings) -> dict[str, str]:
    """The files of a run in which nothing happens."""
    for told in Path(settings.target_model_path).glob("*.told"):
        told.unlink()
    out = settings.output_dir.with_name("whole")
    whole = dataclasses.replace(settings, output_dir=out, data_parallel=1, ray=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "ProcessReplica", InProcess)
        run(whole)
    return digests(whole.output_dir)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("data_*.pt"))}


def tell(settings: Settings, sample: int, what: str) -> None:
    (Path(settings.target_model_path) / f"{1000 * sample + 7}.told").write_text(what)


class InProcess:
    """A replica in this very process: for kills that take everything along, and because it starts at once."""

    def __init__(self, number: int, replica_settings: Any, environment: Any, *, max_restarts: int) -> None:
        from vllm_compat.extraction.replica import Replica

        self.name, self.restarts = f"replica {number}", 0
        self._replica = Replica(replica_settings)

    def call(self, name: str, *args: Any) -> Any:
        future: Future[Any] = Future()
        try:
            answer = getattr(self._replica, name)(*args)
            future.set_result(answer.result() if name == "compute" and answer else answer)
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future

    def load(self) -> Any:
        return self.call("load")

    def drain(self) -> None:
        self._replica.drain()

    def close(self) -> None:
        self._replica.close()

    def join(self) -> None:
        pass
