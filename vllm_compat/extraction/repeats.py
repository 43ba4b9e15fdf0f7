"""Where roundings may take the rows of a prompt in a model with routers: the reference itself is asked, with noise.

A fixed tolerance is wrong for a row that a router may as well send elsewhere (`routers`), and for rows that attend to
it. So the reference's pass of the prompt is repeated with noise, and a row may be as far off as that took it:

- *level* rows, which some router up to this layer sent elsewhere in some repetition, as far as the furthest level row
  of the layer: a jump is seen now and then only, and the next one may lead elsewhere;
- rows behind a level one, to which attention carries the jump, as far as each of them went itself;
- all others as in a dense model; and nobody less than that.

This is never an excuse for a layer as a whole, nor for a large part of one. Noise takes few rows far and most rows not:
where the middle row of all, or the row that 60, 70 or 80 % of all are nearer than, is further off than in any
repetition (times `SLACK`), something was done to the layer, and the usual tolerance holds for all of it. Measured on
tiny models: right data reach 0.53 of what the furthest of 8 repetitions does, 45 % of rows multiplied by 1.3 at least
1.68 of what 64 do.

Nor is it for a place. But a row that went elsewhere may come to lie beside another: the same token stands further up,
or layers differ little. So a level row, or one behind it, is in the wrong place if it is nearer to that place than to
its own in *any* repetition of the one and of the other: a swapped row has gone elsewhere with its own place, and it is
there that it fits best.

The noise is `SIZE` of the usual tolerance of one layer: in bfloat16 2^-6 of a row's length on the input of every layer.
Measured on tiny models, one layer of vLLM's differs from the same layer of Hugging Face's, both in bfloat16, by half of
that (Mixtral, Qwen3-MoE on the CPU; the middle row). Twice what is to be covered, because a jump that a real rounding
makes once in a thousand must show in some dozens of repetitions; half of it missed one row in 2000.

The number of repetitions: 8 do not show all jumps. They are made as long as a row is in question, up to `MOST`: data
that raise no question cost nothing. `SLACK`, because the furthest of some repetitions is not the furthest there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_compat.extraction.routers import otherwise

if TYPE_CHECKING:
    import torch

    from vllm_compat.extraction.reference import Reference

SIZE = 0.5
SLACK = 1.5
SHARES = (0.5, 0.6, 0.7, 0.8)  # of the rows of a layer
FIRST, MOST = 8, 64  # repetitions; each time as many again as there were
_TOKENS = 4096  # in one pass: so many repetitions at once, one at least, need no more memory than a long prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """What noise did to one layer of one prompt. Distances are relative to the length of the row."""

    level: torch.Tensor  # [tokens]: a router up to this layer picked other experts in some repetition
    far: torch.Tensor  # [tokens]: largest distance to the reference in any repetition
    typical: torch.Tensor  # [SHARES]: within which each share of rows is, in the repetition where it was largest
    # The row that is judged: its smallest distance, in any repetition, to its own place and to the places in question,
    own: torch.Tensor  # [tokens]
    row_gap: torch.Tensor  # [tokens]: to the nearest other row
    layer_gap: torch.Tensor  # [tokens]: to the nearest other layer

    @property
    def behind(self) -> torch.Tensor:
        """Level rows and those after one, [tokens]: what a jump can reach."""
        return self.level.cumsum(dim=0) > 0

    def allowed(self, usual: float) -> torch.Tensor:
        """How far each row may be off, [tokens]; `usual` is the tolerance of the layer."""
        import torch

        if not bool(self.level.any()):
            return torch.full_like(self.far, usual)
        far = self.far.masked_fill(self.level, float(self.far[self.level].max()))
        return (SLACK * far * self.behind).clamp_min(usual)

    def excuses(self, error: torch.Tensor, usual: float) -> bool:
        """Whether the distances `error` [rows] of the whole layer are such as noise makes."""
        return not len(error) or bool((_typical(error) <= (SLACK * self.typical).clamp_min(usual)).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """One layer of the prompt that is judged, and the places in question."""

    got: torch.Tensor  # [tokens, hidden]
    want: torch.Tensor  # [tokens, hidden], the reference without noise
    nearest: torch.Tensor  # [tokens]: the nearest other row
    layer_like: torch.Tensor  # [tokens]: id of the nearest other layer


class Repeats:
    """Repetitions of one prompt; what is judged, by layer id. `rounding` is the usual tolerance of one layer."""

    def __init__(
        self, reference: Reference, prompt: Sequence[int], judged: Mapping[int, Judged], rounding: float
    ) -> None:
        import torch

        self._reference, self._prompt, self._judged, self._size = reference, prompt, judged, SIZE * rounding
        self._usual = reference.picks(prompt)
        self.count = 0
        none, nowhere = torch.zeros(len(prompt)), torch.full([len(prompt)], torch.inf)
        nothing = Spread(
            level=none.bool(),
            far=none,
            typical=torch.zeros(len(SHARES)),
            own=nowhere,
            row_gap=nowhere,
            layer_gap=nowhere,
        )
        self._spreads = dict.fromkeys(judged, nothing)

    def more(self) -> dict[int, Spread]:
        """Repeat as often again, at first `FIRST` times; what all repetitions have shown, by layer id."""
        wanted = max(FIRST, 2 * self.count)
        while self.count < wanted:
            passes = min(wanted - self.count, max(1, _TOKENS // len(self._prompt)))
            self._repeat(passes)
            self.count += passes
        return dict(self._spreads)

    def _repeat(self, passes: int) -> None:
        places = {*self._judged, *(other for each in self._judged.values() for other in each.layer_like.tolist())}
        states, picks = self._reference.shaken(
            self._prompt, sorted(places), size=self._size, seed=self.count, passes=passes
        )
        changed = [(router.layer, otherwise(each, self._usual[router]).cpu()) for router, each in picks.items()]
        for layer_id, judged in self._judged.items():
            spread = self._spreads[layer_id]
            for layer, elsewhere in changed:
                if layer <= layer_id:
                    spread = replace(spread, level=spread.level | elsewhere)
            for number in range(passes):
                shaken = {each: states[each][number] for each in {layer_id, *judged.layer_like.tolist()}}
                spread = _widened(spread, layer_id, judged, shaken)
            self._spreads[layer_id] = spread


def _widened(spread: Spread, layer_id: int, judged: Judged, shaken: Mapping[int, torch.Tensor]) -> Spread:
    """`spread` after one more repetition: `shaken` are its states by layer id, [tokens, hidden]."""
    import torch

    def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.float() - other.float()).norm(dim=1) / length

    length = judged.want.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    own, layer_gap = shaken[layer_id], spread.layer_gap
    far = distance(own, judged.want)
    for other in set(judged.layer_like.tolist()) - {layer_id}:
        gap = distance(judged.got, shaken[other]).masked_fill(judged.layer_like != other, torch.inf)
        layer_gap = torch.minimum(layer_gap, gap)
    return replace(
        spread,
        far=torch.maximum(spread.far, far),
        typical=torch.maximum(spread.typical, _typical(far)),
        own=torch.minimum(spread.own, distance(judged.got, own)),
        row_gap=torch.minimum(spread.row_gap, distance(judged.got, own[judged.nearest])),
        layer_gap=layer_gap,
    )


def _typical(distances: torch.Tensor) -> torch.Tensor:
    """Within which each of `SHARES` of the rows are."""
    import torch

    return distances.float().quantile(torch.tensor(SHARES))
