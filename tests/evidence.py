"""Records of real runs: `pytest tests/live --evidence DIR` writes what was compared with Hugging Face, and on what.

One file for each combination of releases, device and tensor parallel size. `docs/evidence/table.py` makes the README's
table of them. A record has no paths and no names of machines in it, and a run in which anything failed leaves none.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
VERSIONS = ("python", "vllm_compat", "speculators", "vllm", "torch", "transformers")


@dataclass
class Run:
    """All comparisons that were made on one device with one tensor parallel size, in this pytest session."""

    device: str
    tensor_parallel: int
    dtype: str
    versions: Mapping[str, str]
    model_runner: str  # vLLM's class
    rows: int = 0  # of all prompts and layers
    min_cosine: float = 1.0
    max_error: float = 0.0  # of one element
    max_relative_error: float = 0.0  # of one row
    patches: set[str] = field(default_factory=set)
    cases: set[str] = field(default_factory=set)

    def add(self, layers: Iterable[dict[str, Any]], patches: Iterable[str]) -> None:
        """`layers`: as in `Report.as_dict`."""
        for layer in layers:
            self.rows += layer["rows"]
            self.min_cosine = min(self.min_cosine, layer["min_cosine"])
            self.max_error = max(self.max_error, layer["max_abs_error"])
            self.max_relative_error = max(self.max_relative_error, layer["max_relative_error"])
        self.patches.update(patches)
        self.cases.add(_current_test())

    def record(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "date": datetime.date.today().isoformat(),
            **{name: self.versions[name] for name in VERSIONS},
            "device": self.device,
            "tensor_parallel": self.tensor_parallel,
            "dtype": self.dtype,
            "model_runner": self.model_runner,
            "patches": sorted(self.patches),
            "rows": self.rows,
            "min_cosine": round(self.min_cosine, 6),
            "max_error": round(self.max_error, 6),
            "max_relative_error": round(self.max_relative_error, 6),
            "cases": sorted(self.cases),
        }


class Evidence:
    """What this session has shown so far; written at its end, if it was asked to and nothing failed."""

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._runs: dict[tuple[str, int], Run] = {}

    def add(
        self,
        layers: Iterable[dict[str, Any]],
        *,
        device: str,
        tensor_parallel: int,
        dtype: str,
        versions: Mapping[str, str],
        model_runner: str,
        patches: Iterable[str],
    ) -> None:
        """Notes one comparison in which every row was right."""
        new = Run(device, tensor_parallel, dtype, versions, model_runner)
        self._runs.setdefault((device, tensor_parallel), new).add(layers, patches)

    def write(self) -> list[Path]:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        files = []
        for run in self._runs.values():
            record = run.record()
            device = re.sub(r"\W+", "-", run.device.lower())
            pair = "-".join(f"{name}-{record[name].partition('+')[0]}" for name in ("speculators", "vllm"))
            versions = f"{pair}-transformers-{record['transformers']}"
            files.append(self.folder / f"{versions}-{device}-tp{run.tensor_parallel}.json")
            files[-1].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return files


def _current_test() -> str:
    """The id of the test that runs, from its file on."""
    name, _, _ = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")  # "tests/live/test_rows.py::test_x (call)"
    path, _, test = name.partition("::")
    return f"{path.rpartition('/')[2]}::{test}"
