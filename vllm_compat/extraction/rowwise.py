"""The comparison of one layer, row by row: distances, margins and what follows from them (see `compare`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_compat.extraction.repeats import Spread

if TYPE_CHECKING:
    import torch

_CHUNK = 1024  # rows compared with all others at once
MANY = 32  # so many rows are no accident,
_NEARLY_ALL = 0.9  # if this share of them is nearer to one and the same other layer

# Relative error of one layer. In 16 bits only results are rounded, sums run in float32; in float32 the sums
# themselves are rounded at every step, so more roundings of less weight.
_ROUNDING = {"torch.bfloat16": 8 * 2.0**-8, "torch.float16": 8 * 2.0**-11, "torch.float32": 256 * 2.0**-23}


def tolerance(dtype: torch.dtype, layer_id: int, cut: float = 1.0) -> float:
    """Allowed relative error of a row after decoder layer `layer_id`, computed in `dtype`; for `cut` see `kernels`."""
    if str(dtype) not in _ROUNDING:
        raise ValueError(f"no tolerance known for {dtype}: expected one of {', '.join(_ROUNDING)}")
    return cut * _ROUNDING[str(dtype)] * math.sqrt(layer_id + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What was found in one layer, row by row: tensors of one entry for each finite row."""

    layer_id: int
    finite: torch.Tensor  # [all rows of the layer]: which ones these are
    place: torch.Tensor  # the row's number among all rows of all prompts
    nearest: torch.Tensor  # likewise: the nearest reference row that is not its own
    layer_like: torch.Tensor  # layer id of the nearest other layer
    error: torch.Tensor  # relative
    max_abs_error: float  # of one element
    tolerance: float  # the usual one of the layer
    near: torch.Tensor  # [all reference rows]: how far off a row may be, see `repeats`; without routers the tolerance
    allowed: torch.Tensor  # the same for these rows, but the tolerance where noise is no excuse for the layer
    excusable: bool  # it is one
    level: torch.Tensor  # [all reference rows]: routers may as well send them elsewhere
    row_gap: torch.Tensor  # distance to `nearest`; infinite where no other row competes
    row_margin: torch.Tensor  # NaN where no other row competes, and where it is undecided
    layer_margin: torch.Tensor  # likewise
    cosine: torch.Tensor
    outside: torch.Tensor  # beyond what is allowed
    misplaced: torch.Tensor
    wrong_layer: torch.Tensor
    undecided: torch.Tensor

    @property
    def wrong(self) -> torch.Tensor:
        return self.outside | self.misplaced | self.wrong_layer


def find(
    got: torch.Tensor,
    index: torch.Tensor,
    layer_id: int,
    wanted: torch.Tensor,
    others: Mapping[int, torch.Tensor],
    keys: torch.Tensor,
    cut: float,
    spread: Spread | None = None,
) -> Found:
    """Compare the rows `got` [n, hidden] of one layer with the rows `index` [n] of its reference `wanted` and of
    `others`, by layer id. `spread` is what noise does to the reference, if that was asked for."""
    import torch

    usual = tolerance(got.dtype, layer_id, cut)
    finite = torch.isfinite(got).all(dim=1)
    rows, place = got[finite].float(), index[finite]
    want = wanted[place]
    length = want.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    own = (rows - want).norm(dim=1)
    error = own / length
    near, level = torch.full([len(wanted)], usual), torch.zeros(len(wanted), dtype=torch.bool)
    excusable = True
    if spread is not None:
        near, level, excusable = spread.allowed(usual), spread.level, spread.excuses(error, usual)
    allowed = near[place] if excusable else torch.full_like(error, usual)
    row_gap, nearest = _nearest_row(rows, wanted, place, keys)
    layer_gap, layer_like = torch.full_like(own, torch.inf), torch.full_like(place, layer_id)
    layer_apart = torch.full_like(own, torch.inf)
    for other_id, states in others.items():
        other = states[place].float()
        gap = (rows - other).norm(dim=1)
        closer = gap < layer_gap
        layer_like[closer] = other_id
        layer_apart = torch.where(closer, (other - want).norm(dim=1), layer_apart)
        layer_gap = torch.minimum(layer_gap, gap)

    # Noise is what this run shows where rows fit best: a run of nothing but swaps must not excuse itself. It is
    # never more than is allowed, and never less than one rounding.
    least = torch.minimum(own, torch.minimum(row_gap, layer_gap)) / length
    seen = 3 * float(least.median()) if len(rows) else usual
    noise = length * min(usual, max(seen, torch.finfo(got.dtype).eps))
    # Noise takes a row to either side. Where nearly all are on the side of one other layer, it excuses none of them.
    together = torch.zeros(len(rows), dtype=torch.bool)
    for other_id in others:
        there = (layer_like == other_id) & (layer_gap < own)
        if len(rows) >= MANY and float(there.float().mean()) >= _NEARLY_ALL:
            together |= there
    row_margin, layer_margin = _margins(own, row_gap), _margins(own, layer_gap)
    if spread is not None:
        reached = spread.behind[place]
        here = torch.minimum(own, length * spread.own[place])
        beside = torch.minimum(row_gap, length * spread.row_gap[place])
        row_margin = torch.where(reached & row_gap.isfinite(), _margins(here, beside), row_margin)
        beside = torch.minimum(layer_gap, length * spread.layer_gap[place])
        layer_margin = torch.where(reached & layer_gap.isfinite() & ~together, _margins(here, beside), layer_margin)
    row_lost, layer_lost = row_margin <= 0, layer_margin <= 0
    row_undecided = row_lost & ((wanted[nearest] - want).norm(dim=1) <= noise)
    layer_undecided = layer_lost & (layer_apart <= noise) & ~together

    return Found(
        layer_id=layer_id,
        finite=finite,
        place=place,
        nearest=nearest,
        layer_like=layer_like,
        error=error,
        max_abs_error=extreme((rows - want).abs(), "max"),
        row_gap=row_gap,
        row_margin=row_margin.masked_fill(row_undecided, torch.nan),
        layer_margin=layer_margin.masked_fill(layer_undecided, torch.nan),
        cosine=torch.nn.functional.cosine_similarity(rows, want, dim=1),
        tolerance=usual,
        near=near,
        allowed=allowed,
        excusable=excusable,
        level=level,
        outside=error > allowed,
        misplaced=row_lost & ~row_undecided,
        wrong_layer=layer_lost & ~layer_undecided,
        undecided=row_undecided | layer_undecided,
    )


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
    """(other - own) / (other + own) in [-1, 1]; 0 where both distances are 0, NaN where there is no other."""
    import torch

    both = other + own
    return (other - own) / both.clamp_min(torch.finfo(both.dtype).tiny)


def prefix_keys(prompts: Sequence[Sequence[int]]) -> list[int]:
    """A number per row; two rows have the same one if and only if all tokens up to theirs are the same."""
    known: dict[tuple[int, int], int] = {}
    keys = []
    for prompt in prompts:
        key = -1
        for token in prompt:
            key = known.setdefault((key, int(token)), len(known))
            keys.append(key)
    return keys


def extreme(values: torch.Tensor, which: str) -> float:
    """Largest or smallest value; NaN if there is none."""
    return float(getattr(values, which)()) if values.numel() else float("nan")
