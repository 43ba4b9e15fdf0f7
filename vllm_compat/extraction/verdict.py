"""The answer of `vllm-compat verify`: what was looked at, the numbers, and every fault, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_compat.extraction.compare import LayerReport, Report
from vllm_compat.extraction.faults import Fault

SCHEMA = 1
_NAMED = 100  # files that are named for one kind of fault; all are counted
_CONFIDENCE = 0.95


@dataclass
class Group:
    """The same fault in several files."""

    fault: Fault  # as it was met first
    files: list[str] = field(default_factory=list)  # the first of them, by name
    count: int = 0  # of files

    @property
    def text(self) -> str:
        others = f" and {self.count - 1} other file{'s' * (self.count != 2)}" if self.count > 1 else ""
        return (
            f"{self.fault.kind}: {replace(self.fault, file=f'{self.fault.file}{others}').text}"
            if others
            else (f"{self.fault.kind}: {self.fault.text}")
        )

    def as_dict(self) -> dict[str, Any]:
        return {**self.fault.as_dict(), "text": self.text, "files": self.files, "count": self.count}


class Faults:
    """Faults as they are found, the same ones together: a folder may have a million files, all with one fault."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._groups: dict[Any, Group] = {}
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        for fault in faults:
            group = self._groups.setdefault((fault.kind, fault.what, fault.layer_ids), Group(fault))
            if fault.file is not None:
                group.count += 1
                group.files += [fault.file] * (len(group.files) < _NAMED)

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(self._groups.values())

    def __bool__(self) -> bool:
        return bool(self._groups)


def total(reports: Iterable[Report]) -> Report:
    """One report for all samples; they were compared one by one. `problems` stay with the samples."""
    layers: dict[int, LayerReport] = {}
    prompts = rows = 0
    for report in reports:
        prompts, rows = prompts + report.prompts, rows + report.rows
        for layer in report.layers:
            old = layers.get(layer.layer_id)
            layers[layer.layer_id] = layer if old is None else _sum(old, layer)
    return Report(prompts=prompts, rows=rows, layers=tuple(layers[each] for each in sorted(layers)), problems=())


def _sum(one: LayerReport, other: LayerReport) -> LayerReport:
    def extreme(name: str, which: Any) -> Any:
        """Without those that have none: no row competed (None), or no row was finite (NaN)."""
        values = (getattr(each, name) for each in (one, other))
        return which((each for each in values if each is not None and each == each), default=getattr(one, name))

    counts = ("rows", "not_finite", "outside", "misplaced", "wrong_layer", "undecided", "level", "excused")
    return replace(
        one,
        **{name: getattr(one, name) + getattr(other, name) for name in counts},
        **{name: extreme(name, max) for name in ("max_abs_error", "max_relative_error", "allowed")},
        **{name: extreme(name, min) for name in ("min_cosine", "row_margin", "layer_margin")},
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was looked at and what was found. `ok` is the whole answer."""

    model: str
    model_layers: int
    folder: str
    made_by: str  # for people
    made_with: Mapping[str, str]  # packages that made the files
    manifest: bool
    versions: Mapping[str, str]  # packages that judged them
    device: str
    dtype: str  # the reference's, and the files'
    layer_ids: tuple[int, ...]
    layers_from: str  # what said which layers the files hold
    files: int  # data files that are there
    whole: int  # of these, read whole and compared with their checksums
    recomputed: Sequence[str]
    seed: int
    report: Report
    faults: Faults
    notes: Sequence[str]
    seconds: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def may_be_wrong(self) -> float:
        """If all that was recomputed is right: the share of files of which fewer are wrong, with 95 % certainty."""
        if len(self.recomputed) == self.files:
            return 0.0
        return 1 - (1 - _CONFIDENCE) ** (1 / len(self.recomputed)) if self.recomputed else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain types only; `schema` counts up when a field changes its meaning."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "faults": [group.as_dict() for group in self.faults.groups],
            "notes": list(self.notes),
            "model": {"path": self.model, "layers": self.model_layers},
            "folder": {"path": self.folder, "manifest": self.manifest, "made_with": dict(self.made_with)},
            "versions": dict(self.versions),
            "device": self.device,
            "dtype": self.dtype,
            "layer_ids": list(self.layer_ids),
            "layers_from": self.layers_from,
            "files": {"found": self.files, "whole": self.whole, "recomputed": list(self.recomputed), "seed": self.seed},
            "may_be_wrong": round(self.may_be_wrong, 4),
            "rows": self.report.rows,
            "margin": self.report.margin,
            "layers": self.report.as_dict()["layers"],
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
        }

    def as_text(self) -> str:
        few = ", ".join(name.removeprefix("data_").removesuffix(".pt") for name in self.recomputed[:16])
        chosen = "all" if len(self.recomputed) == self.files else f"{few}{', ...' * (len(self.recomputed) > 16)}"
        lines = [
            f"model      {self.model}, {self.model_layers} layers, {self.dtype} on {self.device}",
            f"folder     {self.folder}, by {self.made_by}",
            f"layers     {', '.join(map(str, self.layer_ids))} (from {self.layers_from}), each the output of that "
            "decoder layer, before the final norm",
            f"files      {self.files} opened, {self.whole} read whole, {len(self.recomputed)} recomputed with Hugging "
            f"Face (seed {self.seed}: {chosen})",
            f"rows       {self.report.rows}, all rows of these files",
            "",
        ]
        if self.report.layers:
            lines += [self.report.as_text(), ""]
        if self.report.margin is not None:
            worst = f"{self.report.margin:.3f}"
            lines.append(f"Worst margin {worst}: 1 is perfect, at 0 a row fits a wrong place as well as its own.")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAULT {group.text}" for group in self.faults.groups]
        if not self.ok:
            lines.append(f"FAILED: {len(self.faults.groups)} kind(s) of faults, see above. Do not train on such data.")
        elif self.may_be_wrong:
            share = (
                f"fewer than {self.may_be_wrong:.1%} of the files are wrong, with 95 % certainty; --all looks at all"
            )
            lines.append(
                f"OK: every row that was recomputed belongs to its prompt, its position and its layer ({share})."
            )
        else:
            lines.append("OK: every row belongs to its prompt, its position and its layer.")
        return "\n".join(lines)
