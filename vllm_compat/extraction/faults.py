"""What a fault looks like: the comparison says that rows are wrong, this module says what seems to have happened.

Each wrong row is held against everything it could be instead: another row of its prompt, the same row of any layer of
the model, its own row after the final norm, its own row times a number. What it fits best, and within the tolerance,
is its explanation; what rows of a layer have in common is the fault's name. It is a diagnosis, not a proof: the proof
that something is wrong came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.rowwise import Found

if TYPE_CHECKING:
    import torch

MOST_ROWS = 256  # wrong rows of one layer that are looked at; evenly spread
_SAME = 0.8  # share of moved rows that must have moved equally far to be called shifted
_TINY = 1e-30  # stands for a length of zero
_LIKE = 0.9  # cosine from which on a row is its own, only inexact


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `kind` is for machines (docs/verify.md lists them), `what` for people."""

    kind: str
    what: str  # the same words wherever the same thing happened
    file: str | None = None  # None: the folder as a whole
    layer_ids: tuple[int, ...] = ()  # none: not a matter of layers
    rows: int = 0  # in the layer where it has most; 0: not a matter of rows
    example: str = ""
    like: int | None = None  # the layer that a wrong layer looks like

    @property
    def text(self) -> str:
        where = f"{self.file}: " if self.file else ""
        layers = f"{_layers(self.layer_ids)}: " if self.layer_ids else ""
        rows = f"{self.rows} row{'s' * (self.rows != 1)}" if self.rows else ""
        details = ", for example ".join(filter(None, (rows, self.example)))
        return f"{where}{layers}{self.what}{f' ({details})' * bool(details)}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_ids": list(self.layer_ids), "text": self.text}


@dataclass(frozen=True)
class Unexplained:
    """Rows of one layer of one file that nothing in their own prompt explains; they may be another prompt's."""

    file: str
    layer_id: int
    rows: tuple[int, ...]  # their numbers
    states: torch.Tensor  # [rows, hidden], float32
    tolerance: float


def explain(
    file: str,
    found: Sequence[Found],
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    every_layer: Callable[[list[int]], Mapping[int, torch.Tensor]],
    normed: Callable[[torch.Tensor], torch.Tensor | None],
) -> tuple[list[Fault], list[Unexplained]]:
    """Name what is wrong in one prompt.

    `found` is what the comparison of this prompt alone found, `got` and `want` its states and their reference, one
    [tokens, hidden] for each entry of `found`. `every_layer` computes these rows of every layer of the model, by
    layer id; `normed` applies its final norm. Both are asked only if something is wrong.
    """
    faults: list[Fault] = []
    unexplained: list[Unexplained] = []
    looked_at = sorted({row for each in found for row in _spread(each.place[each.wrong].tolist(), MOST_ROWS)})
    levels = every_layer(looked_at) if looked_at else {}
    number = {row: n for n, row in enumerate(looked_at)}
    for each, states, reference in zip(found, got, want, strict=True):
        bad = (~each.finite).nonzero().flatten().tolist()
        if bad:
            what = "holds values that are not finite (NaN or infinity)"
            faults.append(Fault("not-finite", what, file, (each.layer_id,), len(bad), f"row {bad[0]}"))
        if bool(each.wrong.any()):
            chosen = _spread(each.wrong.nonzero().flatten().tolist(), MOST_ROWS)
            here = [number[row] for row in each.place[chosen].tolist()]
            rivals = {layer: rows[here].float() for layer, rows in levels.items()}
            labels = _label(each, chosen, states, reference.float(), rivals, normed)
            named, left = _name(file, each, chosen, labels, states, reference.float())
            faults += named
            unexplained += left
    return _off_by(_together(faults)), unexplained


def _label(
    found: Found,
    chosen: list[int],
    states: torch.Tensor,
    want: torch.Tensor,
    levels: Mapping[int, torch.Tensor],
    normed: Callable[[torch.Tensor], torch.Tensor | None],
) -> list[Any]:
    """What each of the rows `chosen` (numbers into `found`) is: "row" (another one's), the id of another layer,
    "normed", "zero", "scaled", "inexact" or "unexplained"."""
    import torch

    place, nearest = found.place[chosen], found.nearest[chosen]
    rows, own = states[place].float(), want[place]
    fits: dict[Any, torch.Tensor] = {"row": _off(rows, want[nearest])}
    fits["row"][found.row_gap[chosen].isinf()] = torch.inf
    fits |= {layer: _off(rows, other) for layer, other in levels.items() if layer != found.layer_id}
    after_norm = normed(own.to(states.dtype))
    if after_norm is not None:
        fits["normed"] = _off(rows, after_norm.float())
    names = list(fits)
    best, which = torch.stack(list(fits.values())).min(dim=0)
    # Rows of a mixture of experts may be further off, also where they do not belong.
    own_room = found.near[place]
    explained = (best <= torch.where(which == 0, found.near[nearest], own_room)) & (best < found.error[chosen])
    factor = _factor(rows, own)
    bent = _off(rows, factor.unsqueeze(1) * own)
    scaled = (bent <= own_room) & ((factor - 1).abs() > 2 * bent) & (factor > 0)
    labels: list[Any] = []
    for n in range(len(chosen)):
        if not bool(rows[n].any()):
            labels.append("zero")
        elif bool(explained[n]):
            labels.append(names[int(which[n])])
        elif bool(scaled[n]):
            labels.append("scaled")
        elif float(found.cosine[chosen[n]]) > _LIKE:
            labels.append("inexact")
        else:
            labels.append("unexplained")
    return labels


def _name(
    file: str, found: Found, chosen: list[int], labels: list[Any], states: torch.Tensor, want: torch.Tensor
) -> tuple[list[Fault], list[Unexplained]]:
    """The faults of one layer, from the `labels` of its rows `chosen`."""
    faults, unexplained = [], []
    for label, count in Counter(labels).items():
        picked = [chosen[n] for n, each in enumerate(labels) if each == label]
        place = found.place[picked]
        first, rows = int(place[0]), round(count / len(chosen) * int(found.wrong.sum()))
        example, like = f"row {first}", None
        if label == "row":
            kind, what = _moved(place.tolist(), found.nearest[picked].tolist())
            example = f"row {first} holds row {int(found.nearest[picked[0]])}'s states"
        elif label == "zero":
            kind, what = "zero-rows", "rows are zero, as if never written"
        elif label == "normed":
            kind, what = "normed", "looks normed: the model's final norm was applied"
        elif label == "scaled":
            kind, what = "scaled", "looks multiplied by a number"
            example += f" by {float(_factor(states[place].float(), want[place]).median()):.2g}"
        elif label == "inexact":
            kind, what = _inexact(states[place])
            worst = picked[int(found.error[picked].argmax())]
            off, allowed = float(found.error[worst]), float(found.allowed[worst])
            example = f"off by {off:.2g} of its length, {allowed:.2g} is allowed"
        elif label == "unexplained":
            kind, what = "unexplained", "rows are like nothing in their own prompt"
            left, room = states[place].float(), float(found.near[place].max())
            unexplained.append(Unexplained(file, found.layer_id, tuple(place.tolist()), left, room))
        else:
            kind, what, like = "wrong-layer", f"looks like {_layer(label)}", label
        faults.append(Fault(kind, what, file, (found.layer_id,), rows, example, like))
    return faults, unexplained


def _moved(rows: list[int], sources: list[int]) -> tuple[str, str]:
    """Kind and words for rows that hold the states of `sources`, rows of the same prompt and layer."""
    (shift, count), *_ = Counter(row - source for row, source in zip(rows, sources, strict=True)).most_common(1)
    if count >= max(3, _SAME * len(rows)):
        return "shifted-rows", f"rows look shifted by {shift:+d}"
    moved = dict(zip(rows, sources, strict=True))
    if all(moved.get(source) == row for row, source in moved.items()):
        return "swapped-rows", "rows look swapped in pairs"
    return "misplaced-rows", "rows look out of order"


def _inexact(rows: torch.Tensor) -> tuple[str, str]:
    """Kind and words for rows in their place whose values differ by more than rounding explains."""
    import torch

    if rows.dtype == torch.float32 and torch.equal(rows.bfloat16().float(), rows):
        return "wrong-dtype", "values have bfloat16's precision, stored as float32"
    return "inexact", "rows are in place but inexact: computed in lower precision, or with other weights"


def _together(faults: Iterable[Fault]) -> list[Fault]:
    """Faults of one file that happened in several layers become one."""
    merged: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        old = merged.setdefault((fault.kind, fault.what), fault)
        ids = tuple(sorted({*old.layer_ids, *fault.layer_ids}))
        merged[fault.kind, fault.what] = replace(old, layer_ids=ids, rows=max(old.rows, fault.rows))
    return list(merged.values())


def _off_by(faults: list[Fault]) -> list[Fault]:
    """Layers that all look like their neighbours at the same distance are one fault: another numbering."""
    wrong = [fault for fault in faults if fault.like is not None]
    offsets = {(fault.like or 0) - layer_id for fault in wrong for layer_id in fault.layer_ids}
    if len(wrong) < 2 or len(offsets) != 1:
        return faults
    (offset,) = offsets
    what = f"each looks like the layer {offset:+d} from it: numbered otherwise"
    layer_ids = tuple(sorted(layer_id for fault in wrong for layer_id in fault.layer_ids))
    one = Fault("wrong-layer", what, wrong[0].file, layer_ids, max(f.rows for f in wrong), wrong[0].example)
    return [*(fault for fault in faults if fault.like is None), one]


def _off(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distance of each row of `rows` to that of `other`, relative to the latter's length."""
    return (rows - other).norm(dim=1) / other.norm(dim=1).clamp_min(_TINY)


def _factor(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The number by which each row of `own` comes nearest to that of `rows`."""
    return (rows * own).sum(dim=1) / own.square().sum(dim=1).clamp_min(_TINY)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of `values`, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def _layers(ids: Sequence[int]) -> str:
    return f"layer{'s' * (len(ids) != 1)} {', '.join(map(str, ids))}"


def _layer(layer_id: int) -> str:
    return f"layer {layer_id}" if layer_id >= 0 else "the embeddings, what enters layer 0"
