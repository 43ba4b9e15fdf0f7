"""What `vllm-compat demo` says at its end, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_compat.extraction.compare import Report


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What happened. `ok` is the whole answer; `problems` says everything that is wrong."""

    versions: Mapping[str, str]
    device: str
    dtype: str
    tensor_parallel_size: int
    patches: tuple[str, ...]  # ids of the patches applied in this process
    workers: int  # worker processes that proved to run the same files
    model_runner: str | None  # vLLM's class, if any has
    layer_ids: tuple[int, ...]
    samples: int
    tokens: int
    largest_batch: int  # tokens of the largest call of `generate`
    seconds: Mapping[str, float]  # by stage
    tokens_per_second: float  # within the calls of `generate`
    report: Report
    file_problems: tuple[str, ...]
    folder: str | None  # where the files are, if they were kept

    @property
    def problems(self) -> tuple[str, ...]:
        return self.file_problems + self.report.problems

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain types only; `schema` counts up when a field changes its meaning."""
        return {
            "schema": 1,
            "ok": self.ok,
            "versions": dict(self.versions),
            "device": self.device,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "patches": list(self.patches),
            "workers": self.workers,
            "model_runner": self.model_runner,
            "layer_ids": list(self.layer_ids),
            "samples": self.samples,
            "tokens": self.tokens,
            "largest_batch": self.largest_batch,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "tokens_per_second": round(self.tokens_per_second, 1),
            "margin": self.report.margin,
            "layers": self.report.as_dict()["layers"],
            "problems": list(self.problems),
            "folder": self.folder,
        }

    def as_text(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        margin = self.report.margin
        lines = [
            f"versions   {versions}",
            f"ran on     {self.device}, tensor parallel {self.tensor_parallel_size}, {self.dtype}",
            f"patches    {len(self.patches)} applied: {', '.join(self.patches) or 'none'}",
            f"workers    {self.workers} proved to run the same vllm_compat",
            f"samples    {self.samples} with {self.tokens} tokens, at most {self.largest_batch} in one call",
            f"speed      {self.tokens_per_second:.0f} tokens/s (a tiny model: no real one is as fast)",
            "compared   every row read back from the files with Hugging Face's forward of its prompt alone",
            "",
            self.report.as_text(),
            *(f"problem: {problem}" for problem in self.file_problems),
            "",
        ]
        if margin is not None:
            lines.append(f"Worst margin {margin:.3f}: 1 is perfect, at 0 a row fits a wrong place as well as its own.")
        if self.folder is not None:
            lines.append(f"Files kept in {self.folder}")
        if self.ok:
            lines.append("OK: every row belongs to its prompt, its position and its layer.")
        else:
            lines.append(f"FAILED: {len(self.problems)} problem(s), see above. Do not train on such data.")
        return "\n".join(lines)
