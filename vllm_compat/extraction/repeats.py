"""How far roundings may take the rows of a prompt in a model with routers: the reference itself is asked, with noise.

A fixed tolerance is wrong for a row that a router may as well send elsewhere (`routers`), and for rows that attend to
it. So the reference's pass of the prompt is repeated with noise, and a row may be as far off as that took it:

- *level* rows, which some router up to this layer sent elsewhere in some repetition, as far as the furthest level row
  of the layer: a jump is seen now and then only, and the next one may lead elsewhere;
- rows behind a level one, to which attention carries the jump, as far as each of them went itself;
- all others as in a dense model; and nobody less than that.

This is never an excuse for a layer as a whole. Noise takes few rows far and most rows not: where the middle row of all
is further off than in any repetition (times `SLACK`), something was done to the layer, and the usual tolerance holds
for all of it. Nor is it for a place: whether another row or another layer is nearer is asked of level rows as of any.

The noise is `SIZE` of the usual tolerance of one layer: in bfloat16 2^-7 of a row's length on the input of every layer.
Measured on tiny Llama, Mixtral, Qwen3-MoE and DeepSeek-V3 (64 experts, 8 for a token), one layer computed in bfloat16
differs from float32 by 2^-8 in the middle, 2^-7 in the worst row; two implementations by the square root of 2 times
that. Twice this noise would find as much, and would show distances that no rounding makes.

The number of repetitions: 8 do not show all jumps. Of 36000 rows of these models, computed in float32 with 2^-8 of
noise, 47 were still further off than allowed after 8 repetitions, none after 64. More repetitions only allow more, so
they are made as long as a row is in question, up to `MOST`: a prompt that needs none costs none. `SLACK`, because the
furthest of some repetitions is not the furthest that there is; with 1, one of these rows was left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_compat.extraction.routers import otherwise

if TYPE_CHECKING:
    import torch

    from vllm_compat.extraction.reference import Reference

SIZE = 0.25
SLACK = 1.5
FIRST, MOST = 8, 64  # repetitions; each time as many again as there were
_TOKENS = 4096  # in one pass: so many repetitions at once, one at least, need no more memory than a long prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """What noise did to one layer of one prompt. Distances are relative to the length of the row."""

    level: torch.Tensor  # [tokens]: a router up to this layer picked other experts in some repetition
    far: torch.Tensor  # [tokens]: largest distance in any repetition
    middle: float  # distance of the middle row, in the repetition where it was largest

    def allowed(self, usual: float) -> torch.Tensor:
        """How far each row may be off, [tokens]; `usual` is the tolerance of the layer."""
        import torch

        if not bool(self.level.any()):
            return torch.full_like(self.far, usual)
        far = self.far.masked_fill(self.level, float(self.far[self.level].max()))
        behind = self.level.cumsum(dim=0) > 0
        return (SLACK * far * behind).clamp_min(usual)

    def excuses(self, error: torch.Tensor, usual: float) -> bool:
        """Whether the distances `error` [rows] of the whole layer are such as noise makes."""
        return not len(error) or float(error.median()) <= max(usual, SLACK * self.middle)


class Repeats:
    """Repetitions of one prompt; `want` is the reference without noise, [tokens, hidden] by layer id. `rounding` is the
    usual tolerance of one layer."""

    def __init__(
        self, reference: Reference, prompt: Sequence[int], want: Mapping[int, torch.Tensor], rounding: float
    ) -> None:
        import torch

        self._reference, self._prompt, self._want, self._size = reference, prompt, want, SIZE * rounding
        self._usual = reference.picks(prompt)
        self._level = {layer_id: torch.zeros(len(prompt), dtype=torch.bool) for layer_id in want}
        self._far = {layer_id: torch.zeros(len(prompt)) for layer_id in want}
        self._middle = dict.fromkeys(want, 0.0)
        self.count = 0

    def more(self) -> dict[int, Spread]:
        """Repeat as often again, at first `FIRST` times; what all repetitions have shown, by layer id."""
        wanted = max(FIRST, 2 * self.count)
        while self.count < wanted:
            passes = min(wanted - self.count, max(1, _TOKENS // len(self._prompt)))
            self._repeat(passes)
            self.count += passes
        return {
            layer_id: Spread(level=self._level[layer_id], far=self._far[layer_id], middle=self._middle[layer_id])
            for layer_id in self._want
        }

    def _repeat(self, passes: int) -> None:
        import torch

        states, picks = self._reference.shaken(
            self._prompt, list(self._want), size=self._size, seed=self.count, passes=passes
        )
        for router, numbers in picks.items():
            changed = otherwise(numbers, self._usual[router]).cpu()
            for layer_id, level in self._level.items():
                if router.layer <= layer_id:
                    level |= changed
        for layer_id, want in self._want.items():
            own = want.float()
            length = own.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            for shaken in states[layer_id]:
                distance = (shaken.float() - own).norm(dim=1) / length
                torch.maximum(self._far[layer_id], distance, out=self._far[layer_id])
                self._middle[layer_id] = max(self._middle[layer_id], float(distance.median()))
