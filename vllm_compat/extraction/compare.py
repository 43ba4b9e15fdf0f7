"""Whether extracted hidden states are the reference's: by value, by row and by layer.

Closeness alone proves little: two rows of one prompt can be closer to each other than a sloppy tolerance,
and a swapped row then passes. So there are three tests, each on every row of every layer:

- *value*: the relative error |got - want| / |want| is within the tolerance of the layer;
- *row*: the row is nearer to its own reference row than to any other row of any prompt (same layer);
- *layer*: the row is nearer to its own layer than to any other captured layer, or any rival that is given (same
  row). A layer's neighbours are the rivals that matter: in a deep model they differ by less than the tolerance.

The *margin* of the last two is (other - own) / (other + own), where own is the distance to the row's own
reference and other that to the nearest wrong one: 1 is perfect, 0 a tie, below 0 the row is in the wrong
place.

Rows with the same tokens up to and including their own (a common prefix) are identical by right; they do
not compete, if the tokens are given. Two reference rows that are no further apart than the noise seen in
this layer (where its rows fit best, right or wrong) cannot be told from each other: such a row is "undecided",
not misplaced, and more than 1 % of them is a problem unless the caller allows it. The same goes for two layers of
one row, but not where nearly all rows are nearer to the same other layer: that is another layer, however near.

In a mixture of experts a router is a jump, and rows that it may as well send elsewhere are allowed what noise does to
the reference itself: see `repeats`, also for how the tests of row and layer are made of them.

Tolerance: a value in bfloat16 has 8 bits of mantissa, so a rounding is worth up to 2^-8 of it, and each
layer rounds about a dozen times on the way, in another order in each implementation. Roundings of
independent sign add up as the square root of their number: layer k may differ by 8 * 2^-8 * sqrt(k + 1) of
the row's length. Measured on the tiny model: at most 2.5 % between bfloat16 and float32 at layer 7, of 8.8
% allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.repeats import Spread
from vllm_compat.extraction.rowwise import Found, extreme, find, prefix_keys
from vllm_compat.extraction.rowwise import tolerance as tolerance

if TYPE_CHECKING:
    import torch

States = Sequence[Sequence["torch.Tensor"]]  # [prompt][layer] -> [tokens, hidden]

UNDECIDED_SHARE = 0.01
_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What was found in one layer. Counts are rows; errors and margins are over all finite rows."""

    layer_id: int
    rows: int  # compared
    tolerance: float
    max_abs_error: float  # of one element
    max_relative_error: float  # of one row
    min_cosine: float  # between a row and its reference
    row_margin: float | None  # smallest of rows that are not undecided; None where no other row competes
    layer_margin: float | None  # likewise; None where no other layer competes
    not_finite: int
    outside: int  # beyond the tolerance
    misplaced: int  # nearer to another row's reference
    wrong_layer: int  # nearer to another layer's reference
    undecided: int  # nearer to one that cannot be told from its own
    level: int  # routers may as well send them elsewhere, as far as that was asked (see `repeats`)
    excused: int  # beyond the tolerance, but no further than noise takes the reference
    allowed: float  # of the row with most; without routers the tolerance


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `compare`. `ok` is True if nothing at all was found wrong."""

    prompts: int
    rows: int  # per layer, as expected
    layers: tuple[LayerReport, ...]
    problems: tuple[str, ...]
    found: tuple[Found, ...] = field(default=(), repr=False, compare=False)  # like `layers`; not in `as_dict`

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
                f"  {layer.max_relative_error:>8.4f} ({layer.allowed:.4f})"
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
    rivals: Mapping[int, Sequence[torch.Tensor]] | None = None,
    undecided_share: float = UNDECIDED_SHARE,
    cut: float = 1.0,
    spreads: Mapping[int, Spread] | None = None,
) -> Report:
    """Compare extracted states with the reference.

    `got` and `want` hold one list per prompt, in it one [tokens, hidden] tensor for each of `layer_ids`; the
    dtype of `got` sets the tolerance. `prompts` are the token ids: with them rows of a common prefix do not
    compete. `rivals` are reference states of layers that were not captured, by layer id one tensor per prompt:
    they compete in the layer test. More than `undecided_share` of rows that cannot be told from others are a
    problem. `cut` widens the tolerance, for kernels that drop bits (`kernels.cut`). `spreads` is what noise does
    to the reference, by layer id, for one prompt alone. What is wrong with `got` is
    found and reported, never raised; ValueError means that the caller's `want`, `layer_ids` and `prompts` do not
    fit each other.
    """
    import torch

    if not want or any(len(states) != len(layer_ids) for states in want):
        raise ValueError("the reference must hold one tensor per layer id for at least one prompt")
    lengths = [len(states[0]) for states in want]
    if prompts is not None and [len(prompt) for prompt in prompts] != lengths:
        raise ValueError("the reference must have as many rows as the prompts have tokens")
    if spreads is not None and len(want) > 1:
        raise ValueError("what noise does is known of one prompt at a time")

    problems = []
    if len(got) != len(want):
        problems.append(f"{len(got)} prompts, expected {len(want)}")
    places = [(prompt, row) for prompt, length in enumerate(lengths) for row in range(length)]
    keys = torch.tensor(prefix_keys(prompts) if prompts is not None else range(len(places)))
    wanted = [torch.cat([states[i] for states in want]).float() for i in range(len(layer_ids))]
    levels = dict(zip(layer_ids, wanted, strict=True))
    levels |= {layer_id: torch.cat(list(states)) for layer_id, states in (rivals or {}).items()}

    layers, everything = [], []
    for i, layer_id in enumerate(layer_ids):
        tensors, missing = _fitting(got, want, i, layer_id)
        problems += missing
        if not tensors:
            continue
        index = torch.cat([torch.arange(lengths[p]) + sum(lengths[:p]) for p in tensors])
        others = {other: states for other, states in levels.items() if other != layer_id}
        spread = (spreads or {}).get(layer_id)
        found = find(torch.cat(list(tensors.values())), index, layer_id, wanted[i], others, keys, cut, spread)
        layer, said = _report(found, index, places, undecided_share)
        layers.append(layer)
        everything.append(found)
        problems += said
    return Report(
        prompts=len(want), rows=len(places), layers=tuple(layers), problems=tuple(problems), found=tuple(everything)
    )


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


def _report(
    found: Found,
    index: torch.Tensor,
    places: list[tuple[int, int]],
    undecided_share: float,
) -> tuple[LayerReport, list[str]]:
    """`found` in numbers, and its problems in words. `index` are the rows that were compared, finite or not."""
    layer_id, total = found.layer_id, len(index)
    report = LayerReport(
        layer_id=layer_id,
        rows=total,
        tolerance=found.tolerance,
        max_abs_error=found.max_abs_error,
        max_relative_error=extreme(found.error, "max"),
        min_cosine=extreme(found.cosine, "min"),
        row_margin=_smallest(found.row_margin),
        layer_margin=_smallest(found.layer_margin),
        not_finite=int((~found.finite).sum()),
        outside=int(found.outside.sum()),
        misplaced=int(found.misplaced.sum()),
        wrong_layer=int(found.wrong_layer.sum()),
        undecided=int(found.undecided.sum()),
        level=int(found.level.sum()),
        excused=int(((found.error > found.tolerance) & ~found.outside).sum()),
        allowed=extreme(found.allowed, "max") if bool(found.level.any()) else found.tolerance,
    )

    def name(number: int) -> str:
        prompt, row = places[number]
        return f"prompt {prompt} row {row}"

    def problem(where: torch.Tensor, text: str, said: list[str]) -> str:
        more = ", ..." if int(where.sum()) > len(said) else ""
        return f"layer {layer_id}: {int(where.sum())} of {total} rows {text}: {', '.join(said)}{more}"

    place, problems = found.place, []
    if report.not_finite:
        bad = index[~found.finite][:_EXAMPLES].tolist()
        problems.append(problem(~found.finite, "are not finite (NaN or infinity)", [name(n) for n in bad]))
    if report.misplaced:
        pairs = zip(place[found.misplaced].tolist(), found.nearest[found.misplaced].tolist(), strict=True)
        said = [f"{name(here)} holds {name(there)}" for here, there in list(pairs)[:_EXAMPLES]]
        problems.append(problem(found.misplaced, "are nearer to another row", said))
    if report.wrong_layer:
        pairs = zip(place[found.wrong_layer].tolist(), found.layer_like[found.wrong_layer].tolist(), strict=True)
        said = [f"{name(here)} is like layer {other}" for here, other in list(pairs)[:_EXAMPLES]]
        problems.append(problem(found.wrong_layer, "are nearer to another layer", said))
    if report.outside:
        worst = found.error.masked_fill(~found.outside, 0).topk(min(_EXAMPLES, report.outside)).indices
        said = [f"{name(int(place[n]))} by {float(found.error[n]):.3g}" for n in worst]
        problems.append(problem(found.outside, f"differ by more than {found.tolerance:.3g} of their length", said))
    if report.undecided > undecided_share * total:
        bad = place[found.undecided][:_EXAMPLES].tolist()
        problems.append(problem(found.undecided, "cannot be told from another", [name(n) for n in bad]))
    return report, problems


def _smallest(margins: torch.Tensor) -> float | None:
    """Of those that there are."""
    there = margins[~margins.isnan()]
    return float(there.min()) if there.numel() else None


def _margin(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
