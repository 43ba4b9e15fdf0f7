"""One data file after the other against the reference; what is wrong gets its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.extraction.compare import Report, compare
from vllm_compat.extraction.faults import Fault, Unexplained, explain
from vllm_compat.extraction.manifest import FileRecord
from vllm_compat.extraction.reference import EMBEDDINGS, Reference
from vllm_compat.extraction.repeats import MOST, Judged, Repeats
from vllm_compat.extraction.rowwise import MANY, Found, tolerance
from vllm_compat.extraction.samples import Sample, Unfit, damaged_tensor, read_sample
from vllm_compat.extraction.store import sha256_of
from vllm_compat.extraction.verdict import Faults, total

if TYPE_CHECKING:
    import torch

_KEPT = 4  # files whose unexplained rows are kept for the search
_SEARCHED = 32  # prompts that are recomputed to find where rows came from


def check_whole(path: Path, record: FileRecord | None) -> list[Fault]:
    """Whether the file's bytes are those that were written: by its manifest record, else by its own checksums. Reads
    all of it, unpickles nothing."""
    try:
        if record is not None:
            if sha256_of(path) != record.sha256:
                return [Fault("changed-file", "is not as it was written", path.name, example="SHA-256")]
        elif (tensor := damaged_tensor(path)) is not None:
            return [
                Fault("damaged-file", "has other bytes than were written", path.name, example=f"CRC-32 of {tensor}")
            ]
    except Exception as error:  # noqa: BLE001 - the index of a damaged archive can say anything
        text = str(getattr(error, "strerror", None) or error)
        return [Fault("damaged-file", "cannot be read", path.name, example=text)]
    return []


class Judge:
    """Compares files of `layer_ids` with `reference`; finds go to `faults`, numbers to `report`."""

    def __init__(
        self, reference: Reference, layer_ids: Sequence[int], dtype: torch.dtype, faults: Faults, *, cut: float = 1.0
    ) -> None:
        self._reference, self._layer_ids, self._dtype, self._faults = reference, list(layer_ids), dtype, faults
        self._cut = cut
        # A layer's neighbours compete: in a deep model they are nearer than the tolerance.
        beside = {each + step for each in layer_ids for step in (-1, 1)} - set(layer_ids)
        self._rivals = sorted(each for each in beside if EMBEDDINGS <= each < reference.layers)
        self._pending: list[tuple[Fault, Unexplained | None]] = []
        self._judged: set[str] = set()
        self.report = Report(prompts=0, rows=0, layers=(), problems=())

    def judge(self, path: Path) -> None:
        """Compare every row of the file."""
        try:
            sample = self._read(path)
        except Unfit as unfit:
            self._faults.add(unfit.fault)
            return
        ids = sample.input_ids.tolist()
        if not 0 <= min(ids) <= max(ids) < self._reference.vocabulary:
            row = next(n for n, each in enumerate(ids) if not 0 <= each < self._reference.vocabulary)
            what = f"holds token ids outside the model's vocabulary of {self._reference.vocabulary}"
            self._faults.add(Fault("token-id", what, path.name, example=f"row {row}: {ids[row]}"))
            return
        states = self._reference.states(ids, [*self._layer_ids, *self._rivals])
        want, beside = states[: len(self._layer_ids)], states[len(self._layer_ids) :]
        got = [each.to(self._dtype) for each in sample.hidden_states]
        compared = partial(
            compare,
            [got],
            [want],
            layer_ids=self._layer_ids,
            prompts=[ids],
            rivals={layer: [each] for layer, each in zip(self._rivals, beside, strict=True)},
            cut=self._cut,
            undecided_share=1,  # a prompt may well repeat itself: rows that are equal by right are counted, no fault
        )
        report = compared()
        if self._reference.routers and _wrong(report):
            report = self._repeated(ids, report, got, want, compared)
        self._judged.add(path.name)
        if not report.ok:
            self._explain(path.name, ids, report, got, want)
        self.report = total([self.report, report])

    def _repeated(
        self,
        ids: list[int],
        report: Report,
        got: list[torch.Tensor],
        want: list[torch.Tensor],
        compared: Callable[..., Report],
    ) -> Report:
        """What `compared` says once it knows what noise does to the reference; `report` is what it said before."""
        judged = {
            found.layer_id: _judged(found, states, reference)
            for found, states, reference in zip(report.found, got, want, strict=True)
        }
        repeats = Repeats(self._reference, ids, judged, tolerance(self._dtype, 0, self._cut))
        while True:
            report = compared(spreads=repeats.more())
            # Where a whole layer is wrong, more of it says nothing new; a few rows may be so by chance.
            hopeless = len(ids) >= MANY and any(_hopeless(found) for found in report.found)
            if hopeless or not _wrong(report) or repeats.count >= MOST:
                return report

    def _read(self, path: Path) -> Sample:
        return read_sample(path, layers=len(self._layer_ids), hidden_size=self._reference.hidden_size)

    def _explain(
        self, name: str, ids: list[int], report: Report, got: list[torch.Tensor], want: list[torch.Tensor]
    ) -> None:
        every = list(range(EMBEDDINGS, self._reference.layers))

        def every_layer(rows: list[int]) -> Mapping[int, torch.Tensor]:
            return dict(zip(every, self._reference.states(ids, every, rows=rows), strict=True))

        faults, unexplained = explain(name, report.found, got, want, every_layer, self._reference.normed)
        kept = len({each.file for _, each in self._pending if each is not None}) < _KEPT
        for fault in faults:
            if fault.kind == "unexplained":
                self._pending.append((fault, unexplained[0] if kept else None))
            else:
                self._faults.add(fault)

    @property
    def unexplained(self) -> list[str]:
        """Files with rows that are like nothing in their own prompt: call `search`."""
        return list(dict.fromkeys(fault.file for fault, _ in self._pending if fault.file is not None))

    def search(self, paths: Iterable[Path]) -> None:
        """Look for the unexplained rows in the prompts of these files, and name what was found. At most 32 prompts are
        recomputed."""
        sources: dict[str, str] = {}  # file -> where a row of it comes from
        wanted = [each for _, each in self._pending if each is not None]
        for path in list(paths)[:_SEARCHED]:
            looking = [each for each in wanted if each.file != path.name and each.file not in sources]
            try:
                ids = self._read(path).input_ids.tolist()
            except Unfit:
                continue
            if not looking or not 0 <= min(ids) <= max(ids) < self._reference.vocabulary:
                continue
            for each, states in zip(
                looking, self._reference.states(ids, [each.layer_id for each in looking]), strict=True
            ):
                if (found := _source(each, states.float())) is not None:
                    sources[each.file] = f"row {found[0]} holds row {found[1]} of {path.name}"
        lost = {fault.file for fault, _ in self._pending if fault.layer_ids == tuple(self._layer_ids)} - sources.keys()
        if lost == self._judged:
            self._faults.add(
                Fault("other-model", "no layer of any file fits: are they another model's, or revision's?")
            )
        for fault, _ in self._pending:
            if fault.file in sources:
                what = "rows look like another prompt's"
                fault = replace(fault, kind="other-prompt", what=what, example=sources[fault.file])
            self._faults.add(fault)
        self._pending.clear()


def _wrong(report: Report) -> bool:
    return any(bool(found.wrong.any()) for found in report.found)


def _hopeless(found: Found) -> bool:
    """Most rows are wrong, or too far off for noise."""
    return not found.excusable or float(found.wrong.float().mean()) > 0.5


def _judged(found: Found, got: torch.Tensor, want: torch.Tensor) -> Judged:
    """What was found of the finite rows, for all of them."""
    import torch

    nearest, layer_like = torch.arange(len(want)), torch.full([len(want)], found.layer_id)
    nearest[found.place], layer_like[found.place] = found.nearest, found.layer_like
    return Judged(got=got, want=want, nearest=nearest, layer_like=layer_like)


def _source(rows: Unexplained, states: torch.Tensor) -> tuple[int, int] | None:
    """A row of `rows`, and the row of `states` [tokens, hidden] that it is; None if none is any."""
    import torch

    distance = torch.cdist(rows.states, states, compute_mode="donot_use_mm_for_euclid_dist")
    relative, source = (distance / states.norm(dim=1).clamp_min(1e-30)).min(dim=1)
    best = int(relative.argmin())
    return (rows.rows[best], int(source[best])) if float(relative[best]) <= rows.tolerance else None
