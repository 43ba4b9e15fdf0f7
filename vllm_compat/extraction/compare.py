"""Whether extracted hidden states are the reference's: by value, by row and by layer.

Closeness alone proves little: two rows of one prompt can be closer to each other than a sloppy tolerance,
and a swapped row then passes. So there are three tests, each on every row of every layer:

- *value*: the relative error |got - want| / |want| is within the tolerance of the layer;
- *row*: the row is nearer to its own reference row than to any other row of any prompt (same layer);
- *layer*: the row is nearer to its own layer than to any other captured layer (same row).

The *margin* of the last two is (other - own) / (other + own), where own is the distance to the row's own
reference and other that to the nearest wrong one: 1 is perfect, 0 a tie, below 0 the row is in the wrong
place.

Rows with the same tokens up to and including their own (a common prefix) are identical by right; they do
not compete, if the tokens are given. Two reference rows that are no further apart than the noise seen in
this layer cannot be told from each other: such a row is "undecided", not misplaced, and more than 1 % of
them is a problem.

Tolerance: a value in bfloat16 has 8 bits of mantissa, so a rounding is worth up to 2^-8 of it, and each
layer rounds about a dozen times on the way, in another order in each implementation. Roundings of
independent sign add up as the square root of their number: layer k may differ by 8 * 2^-8 * sqrt(k + 1) of
the row's length. Measured on the tiny model: at most 2.5 % between bfloat16 and float32 at layer 7, of 8.8
% allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

States = Sequence[Sequence["torch.Tensor"]]  # [prompt][layer] -> [tokens, hidden]

UNDECIDED_SHARE = 0.01
_EXAMPLES = 3
_CHUNK = 1024  # rows compared with all others at once

# Relative error of one layer. In 16 bits only results are rounded, sums run in float32; in float32 the sums
# themselves are rounded at every step, so more roundings of less weight.
_ROUNDING = {"torch.bfloat16": 8 * 2.0**-8, "torch.float16": 8 * 2.0**-11, "torch.float32": 256 * 2.0**-23}


def tolerance(dtype: torch.dtype, layer_id: int) -> float:
    """Allowed relative error of a row after decoder layer `layer_id`, computed in `dtype`."""
    if str(dtype) not in _ROUNDING:
        raise ValueError(f"no tolerance known for {dtype}: expected one of {', '.join(_ROUNDING)}")
    return _ROUNDING[str(dtype)] * math.sqrt(layer_id + 1)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What was found in one layer. Counts are rows; errors and margins are over all finite rows."""

    layer_id: int
    rows: int  # compared
    tolerance: float
    max_abs_error: float  # of one element
    max_relative_error: float  # of one row
    min_cosine: float  # between a row and its reference
    row_margin: float | None  # smallest; None where no other row competes
    layer_margin: float | None  # smallest; None where one layer was captured
    not_finite: int
    outside: int  # beyond the tolerance
    misplaced: int  # nearer to another row's reference
    wrong_layer: int  # nearer to another layer's reference
    undecided: int  # nearer to one that cannot be told from its own


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `compare`. `ok` is True if nothing at all was found wrong."""

    prompts: int
    rows: int  # per layer, as expected
    layers: tuple[LayerReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def margin(self) -> float | None:
        """Worst margin of the row and layer tests; None where nothing competed."""
        both = [margin for layer in self.layers for margin in (layer.row_margin, layer.layer_margin)]
        return min((margin for margin in both if margin is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "prompts": self.prompts,
            "rows": self.rows,
            "margin": self.margin,
            "layers": [
                # JSON has no NaN: no finite row means no error and no cosine.
                {name: None if value != value else value for name, value in asdict(layer).items()}
                for layer in self.layers
            ],
            "problems": list(self.problems),
        }

    def as_text(self) -> str:
        """One line per layer, then the problems."""
        lines = ["layer    rows  largest error  relative (allowed)  smallest cosine  row margin  by layer"]
        for layer in self.layers:
            lines.append(
                f"{layer.layer_id:>5}  {layer.rows:>6}  {layer.max_abs_error:>13.4g}"
                f"  {layer.max_relative_error:>8.4f} ({layer.tolerance:.4f})"
                f"  {layer.min_cosine:>15.6f}  {_margin(layer.row_margin):>10}"
                f"  {_margin(layer.layer_margin):>8}"
            )
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def compare(
    got: States,
    want: States,
    *,
    layer_ids: Sequence[int],
    prompts: Sequence[Sequence[int]] | None = None,
) -> Report:
    """Compare extracted states with the reference.

    `got` and `want` hold one list per prompt, in it one [tokens, hidden] tensor for each of `layer_ids`; the
    dtype of `got` sets the tolerance. `prompts` are the token ids: with them rows of a common prefix do not
    compete. What is wrong with `got` is found and reported, never raised; ValueError means that the caller's
    `want`, `layer_ids` and `prompts` do not fit each other.
    """
    import torch

    if not want or any(len(states) != len(layer_ids) for states in want):
        raise ValueError("the reference must hold one tensor per layer id for at least one prompt")
    lengths = [len(states[0]) for states in want]
    if prompts is not None and [len(prompt) for prompt in prompts] != lengths:
        raise ValueError("the reference must have as many rows as the prompts have tokens")

    problems = []
    if len(got) != len(want):
        problems.append(f"{len(got)} prompts, expected {len(want)}")
    places = [(prompt, row) for prompt, length in enumerate(lengths) for row in range(length)]
    keys = torch.tensor(_prefix_keys(prompts) if prompts is not None else range(len(places)))
    wanted = [torch.cat([states[i].float() for states in want]) for i in range(len(layer_ids))]

    layers = []
    for i, layer_id in enumerate(layer_ids):
        tensors, missing = _fitting(got, want, i, layer_id)
        problems += missing
        if not tensors:
            continue
        index = torch.cat([torch.arange(lengths[p]) + sum(lengths[:p]) for p in tensors])
        rows = torch.cat(list(tensors.values()))
        others = [j for j, other in enumerate(layer_ids) if other != layer_id]
        layer, found = _compare_layer(rows, index, wanted, i, others, layer_ids, keys, places)
        layers.append(layer)
        problems += found
    return Report(prompts=len(want), rows=len(places), layers=tuple(layers), problems=tuple(problems))


def _fitting(got: States, want: States, i: int, layer_id: int) -> tuple[dict[int, torch.Tensor], list[str]]:
    """The tensors of layer `i` by prompt where their shape is right, and a problem for each that is not."""
    tensors: dict[int, torch.Tensor] = {}
    problems = []
    for prompt, (states, expected) in enumerate(zip(got, want, strict=False)):
        if len(states) != len(expected) and i == 0:
            problems.append(f"prompt {prompt}: {len(states)} layers, expected {len(expected)}")
        if i >= len(states):
            continue
        if states[i].shape != expected[i].shape:
            problems.append(
                f"prompt {prompt}, layer {layer_id}: shape {tuple(states[i].shape)}, "
                f"expected {tuple(expected[i].shape)}"
            )
        else:
            tensors[prompt] = states[i]
    return tensors, problems


def _compare_layer(
    got: torch.Tensor,
    index: torch.Tensor,
    wanted: list[torch.Tensor],
    i: int,
    others: list[int],
    layer_ids: Sequence[int],
    keys: torch.Tensor,
    places: list[tuple[int, int]],
) -> tuple[LayerReport, list[str]]:
    """Compare the rows `got` [n, hidden] of layer `i` with the reference rows `index` [n]."""
    import torch

    layer_id, allowed = layer_ids[i], tolerance(got.dtype, layer_ids[i])
    finite = torch.isfinite(got).all(dim=1)
    rows, place = got[finite].float(), index[finite]
    want = wanted[i][place]
    length = want.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    own = (rows - want).norm(dim=1)
    error = own / length
    # Noise is what this run shows, but never more than is allowed: a run of nothing but swaps must not excuse
    # itself.
    noise = (length * min(allowed, 3 * float(error.median()))) if len(rows) else length

    row_gap, nearest = _nearest_row(rows, wanted[i], place, keys)
    row_margin = _margins(own, row_gap)
    row_lost = (row_margin <= 0) & row_gap.isfinite()
    row_undecided = row_lost & ((wanted[i][nearest] - want).norm(dim=1) <= noise)

    layer_margin, layer_lost = torch.ones_like(own), torch.zeros_like(row_lost)
    layer_undecided, layer_like = layer_lost.clone(), torch.zeros_like(place)
    for j in others:
        other = wanted[j][place]
        margin = _margins(own, (rows - other).norm(dim=1))
        layer_like[margin < layer_margin] = j
        layer_undecided |= (margin <= 0) & ((other - want).norm(dim=1) <= noise)
        layer_lost |= margin <= 0
        layer_margin = torch.minimum(layer_margin, margin)

    misplaced, wrong_layer = row_lost & ~row_undecided, layer_lost & ~layer_undecided
    outside, undecided = error > allowed, row_undecided | layer_undecided
    cosine = torch.nn.functional.cosine_similarity(rows, want, dim=1)
    report = LayerReport(
        layer_id=layer_id,
        rows=len(got),
        tolerance=allowed,
        max_abs_error=_extreme((rows - want).abs(), "max"),
        max_relative_error=_extreme(error, "max"),
        min_cosine=_extreme(cosine, "min"),
        row_margin=_extreme(row_margin, "min") if bool(row_gap.isfinite().any()) else None,
        layer_margin=_extreme(layer_margin, "min") if others else None,
        not_finite=int((~finite).sum()),
        outside=int(outside.sum()),
        misplaced=int(misplaced.sum()),
        wrong_layer=int(wrong_layer.sum()),
        undecided=int(undecided.sum()),
    )

    def name(number: int) -> str:
        prompt, row = places[number]
        return f"prompt {prompt} row {row}"

    def problem(where: torch.Tensor, text: str, said: list[str]) -> str:
        more = ", ..." if int(where.sum()) > len(said) else ""
        return f"layer {layer_id}: {int(where.sum())} of {len(got)} rows {text}: {', '.join(said)}{more}"

    problems = []
    if report.not_finite:
        bad = index[~finite][:_EXAMPLES].tolist()
        problems.append(problem(~finite, "are not finite (NaN or infinity)", [name(n) for n in bad]))
    if report.misplaced:
        pairs = zip(place[misplaced].tolist(), nearest[misplaced].tolist(), strict=True)
        said = [f"{name(here)} holds {name(there)}" for here, there in list(pairs)[:_EXAMPLES]]
        problems.append(problem(misplaced, "are nearer to another row", said))
    if report.wrong_layer:
        pairs = zip(place[wrong_layer].tolist(), layer_like[wrong_layer].tolist(), strict=True)
        said = [f"{name(here)} is like layer {layer_ids[j]}" for here, j in list(pairs)[:_EXAMPLES]]
        problems.append(problem(wrong_layer, "are nearer to another layer", said))
    if report.outside:
        worst = error.masked_fill(~outside, 0).topk(min(_EXAMPLES, report.outside)).indices
        said = [f"{name(int(place[n]))} by {float(error[n]):.3g}" for n in worst]
        problems.append(problem(outside, f"differ by more than {allowed:.3g} of their length", said))
    if report.undecided > UNDECIDED_SHARE * len(got):
        bad = place[undecided][:_EXAMPLES].tolist()
        problems.append(problem(undecided, "cannot be told from another", [name(n) for n in bad]))
    return report, problems


def _nearest_row(
    rows: torch.Tensor, want: torch.Tensor, place: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `rows` the distance to the nearest reference row of another key, and which one that is.

    The distance is infinite where there is no other. A matrix product finds the candidate, which is fast but
    loses digits; its distance is then computed exactly.
    """
    import torch

    middle = want.mean(dim=0)  # rows have much in common: without it fewer digits are lost
    centred = want - middle
    # |row - other|^2 is |other|^2 - 2 row.other plus |row|^2, which is the same for all others: one product.
    others = torch.cat([-2 * centred, centred.square().sum(dim=1, keepdim=True)], dim=1).T
    _, group, sizes = keys.unique(return_inverse=True, return_counts=True)
    shared = (sizes[group] > 1).nonzero().squeeze(1)  # rows that have a twin: few, so the mask below is small
    gaps, nearest = [], []
    for chunk, here in zip(rows.split(_CHUNK), place.split(_CHUNK), strict=True):
        scores = torch.nn.functional.pad(chunk - middle, (0, 1), value=1.0) @ others
        scores[torch.arange(len(here)), here] = torch.inf
        scores[:, shared] = scores[:, shared].masked_fill(
            keys[here].unsqueeze(1) == keys[shared].unsqueeze(0), torch.inf
        )
        best = scores.min(dim=1)
        gaps.append((chunk - want[best.indices]).norm(dim=1).masked_fill(best.values.isinf(), torch.inf))
        nearest.append(best.indices)
    if not gaps:
        return rows.new_empty(0), place.new_empty(0)
    return torch.cat(gaps), torch.cat(nearest)


def _margins(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(other - own) / (other + own) in [-1, 1]; 1 where there is no other, 0 where both distances are 0."""
    import torch

    both = other + own
    margin = (other - own) / both.clamp_min(torch.finfo(both.dtype).tiny)
    return margin.masked_fill(other.isinf(), 1.0)


def _prefix_keys(prompts: Sequence[Sequence[int]]) -> list[int]:
    """A number per row; two rows have the same one if and only if all tokens up to theirs are the same."""
    known: dict[tuple[int, int], int] = {}
    keys = []
    for prompt in prompts:
        key = -1
        for token in prompt:
            key = known.setdefault((key, int(token)), len(known))
            keys.append(key)
    return keys


def _extreme(values: torch.Tensor, which: str) -> float:
    """Largest or smallest value; NaN if there is none."""
    return float(getattr(values, which)()) if values.numel() else float("nan")


def _margin(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
