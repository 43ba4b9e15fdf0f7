"""An engine that computes like a model whose rounding depends on who is in the batch; needs torch, and no vLLM."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

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
    import hashlib

    import numpy

    from vllm_compat.extraction.dataset import Samples, add_prompt

    rows, digest = Rows(lengths), hashlib.sha256()
    for ids in rows.ids:
        add_prompt(digest, ids[: seq_length - 1], ids[: seq_length - 1] % 2)
    cut = numpy.array([min(each, seq_length - 1) for each in lengths], dtype=numpy.int64)
    return Samples(rows, cut, digest.hexdigest())
