"""How a run of `vllm-compat extract` went: for people and, as `extract_report.json` and `--json`, for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_compat.extraction.space import size

SCHEMA = 1


@dataclass(kw_only=True)
class Report:
    """Filled while the run goes on. `outcome`: complete, stopped, failed, planned (`--dry-run`)."""

    folder: str
    outcome: str = "failed"
    error: str | None = None
    session: str | None = None  # its id in the manifest; None: the run ended before the folder was touched
    samples: int = 0  # of the whole set
    tokens: int = 0
    files_before: int = 0  # that were there and good
    files_written: int = 0
    tokens_computed: int = 0
    bytes_written: int = 0
    bytes_needed: int = 0
    bytes_free: int = 0
    batches_again: int = 0  # batches with files that were there, computed again as a whole
    differing: list[str] = field(default_factory=list)  # of their files, those that came out otherwise
    quarantined: list[str] = field(default_factory=list)
    unfinished: int = 0  # temporary files that were removed
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)  # of the replicas' time: generate, disk, idle
    replicas: list[str] = field(default_factory=list)  # every process that computed, replacements too
    replaced: int = 0
    states: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    patches: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.outcome in ("complete", "planned")

    def as_dict(self) -> dict[str, Any]:
        rounded = {
            name: {key: round(value, 3) for key, value in getattr(self, name).items()} for name in ("seconds", "shares")
        }
        rates = {name: round(getattr(self, name), 3) for name in ("samples_per_second", "tokens_per_second")}
        return {"schema": SCHEMA, "ok": self.ok, **vars(self), **rounded, **rates}

    def as_text(self) -> str:
        there = self.files_before + self.files_written
        lines = [f"folder     {self.folder}"]
        if self.versions:
            lines.append("versions   " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))
            lines.append(f"patches    {len(self.patches)} applied: {', '.join(self.patches)}")
        if self.states:
            layers = ", ".join(map(str, self.states["layer_ids"]))
            lines.append(f"states     layers {layers}, width {self.states['hidden_size']}, {self.states['dtype']}")
        lines.append(f"samples    {there} of {self.samples} are there, {self.files_written} written in this run")
        if self.files_written:
            shares = ", ".join(f"{name} {100 * part:.0f} %" for name, part in self.shares.items())
            lines.append(
                f"speed      {self.samples_per_second:.2f} samples/s, {self.tokens_per_second:.0f} tokens/s, "
                f"{size(self.bytes_written)} written; {shares}"
            )
        if self.batches_again:
            lines.append(f"again      {self.batches_again} batches with files that were there")
        if self.quarantined:
            lines.append(f"put aside  {len(self.quarantined)} files, in quarantine/: {', '.join(self.quarantined[:5])}")
        if self.replaced:
            lines.append(f"replaced   {self.replaced} lost replicas")
        lines += [f"warning: {text}" for text in self.warnings]
        lines.append("time       " + ", ".join(f"{stage} {each:.1f} s" for stage, each in self.seconds.items()))
        lines.append(
            {"complete": self._complete, "stopped": self._stopped, "planned": self._planned}.get(
                self.outcome, lambda: f"FAILED: {self.error}"
            )()
        )
        return "\n".join(lines)

    def _complete(self) -> str:
        return (
            f"OK: {self.samples} files with {self.tokens} tokens. `vllm-compat verify` compares them with Hugging Face."
        )

    def _stopped(self) -> str:
        return f"STOPPED by {self.error}. What is there is whole; the same command goes on."

    def _planned(self) -> str:
        return (
            f"PLANNED: {self.samples - self.files_before} files to write, {size(self.bytes_needed)} needed, "
            f"{size(self.bytes_free)} free."
        )
