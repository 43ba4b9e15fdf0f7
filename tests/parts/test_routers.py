"""Routers are found, their picks are those that count, and noise is what it says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo.build import build
from zoo.families import FAMILY, LAYERS, VOCABULARY

from vllm_compat.extraction.compare import compare
from vllm_compat.extraction.reference import EMBEDDINGS, Reference
from vllm_compat.extraction.repeats import SHARES, SLACK, Spread
from vllm_compat.extraction.routers import find_routers, listening, otherwise, shaking

# Name -> numbers of the layers that have experts. DeepSeek-V3 picks within groups and with a bias, ERNIE with a bias
# outside of its gate.
SPARSE = {
    "Mixtral": [0, 1, 2, 3],
    "Qwen3-MoE": [0, 1, 2, 3],
    "DeepSeek-V2": [1, 2, 3],
    "DeepSeek-V3": [1, 2, 3],
    "GLM-4-MoE": [1, 2, 3],
    "ERNIE-4.5-MoE": [1, 2, 3],
    "gpt-oss": [0, 1, 2, 3],
    "Llama-4-text": [1, 3],
}


@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "Phi-3", "Llama-4-text-dense"])
def test_a_dense_model_has_none(name: str, tmp_path: Path) -> None:
    assert Reference(build(FAMILY[name], tmp_path).folder, dtype=torch.float32).routers == ()


@pytest.mark.parametrize("name", SPARSE)
def test_what_a_router_picks_is_what_counts(name: str, tmp_path: Path) -> None:
    """Without one of the picked experts a token's row is another one; without all others it is the same."""
    reference = Reference(build(FAMILY[name], tmp_path).folder, dtype=torch.float32)
    assert [router.layer for router in reference.routers] == SPARSE[name]
    # One and the same token: where a bias picks an expert whose score is small, its weight may be small, too.
    seeded = torch.Generator().manual_seed(0)
    router, (token,) = reference.routers[0], torch.randint(3, VOCABULARY, (1,), generator=seeded).tolist()
    (before,) = reference.states([token], [router.layer])
    picked = reference.picks([token])[router][0].tolist()
    assert len(set(picked)) == router.picked

    def without(numbers: list[int]) -> Any:
        kept = copy.deepcopy(router.beside.state_dict())
        for weights in router.beside.state_dict(keep_vars=True).values():
            if weights.ndim == 3 or (name == "gpt-oss" and weights.ndim == 2):
                weights.data[numbers] = 0
        if isinstance(router.beside, nn.ModuleList):
            for number in numbers:
                for weights in router.beside[number].parameters():
                    weights.data.zero_()
        (after,) = reference.states([token], [router.layer])
        router.beside.load_state_dict(kept)
        return after

    others = [number for number in range(router.experts) if number not in picked]
    assert torch.equal(without(others), before)
    for number in picked:
        assert (without([number]) - before).norm() > 0.01 * before.norm()


class _Experts(nn.Module):
    def forward(self, rows: Any, numbers: Any, weights: Any) -> Any:
        return rows


class _Block(nn.Module):
    """A layer whose router returns scores only; what is picked is decided beside it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.gate, self.experts, self.gate_proj = nn.Linear(4, outputs), _Experts(), nn.Linear(4, 6)
        self.shared_expert_gate = nn.Linear(4, 1)

    def forward(self, rows: Any) -> Any:
        scores = self.gate(rows)
        lowest = (-scores).topk(2, dim=-1).indices
        return self.experts(rows, lowest, scores) + self.gate_proj(rows).sum() + self.shared_expert_gate(rows)


class _Config:
    num_experts, num_experts_per_tok = 6, 2


def test_what_the_experts_are_told_settles_it() -> None:
    layers = nn.ModuleList([_Block(6)])
    (router,) = find_routers(layers, _Config)
    assert router.module is layers[0].gate
    rows = torch.randn(5, 4)
    with listening([router]) as picks:
        layers[0](rows)
    expected = (-layers[0].gate(rows)).topk(2, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(picks[router], expected)
    layers[0](torch.randn(7, 4))
    assert len(picks[router]) == 5, "nothing listens any more"


def test_a_gate_of_another_width_picks_nothing() -> None:
    layers = nn.ModuleList([_Block(3)])
    layers[0].experts = nn.Identity()
    layers[0].forward = lambda rows: layers[0].gate(rows)  # type: ignore[method-assign]
    with listening(find_routers(layers, _Config)) as picks:
        layers[0](torch.randn(5, 4))
    assert picks == {}
    assert find_routers(layers, object()) == (), "a configuration without experts"


def test_tokens_that_go_elsewhere() -> None:
    usual = torch.tensor([[0, 1], [2, 3], [4, 5]])
    twice = torch.cat([usual, usual])
    assert otherwise(twice, usual).tolist() == [False, False, False]
    twice[4] = torch.tensor([2, 4])
    assert otherwise(twice, usual).tolist() == [False, True, False]


def test_noise(tmp_path: Path) -> None:
    reference = Reference(build(FAMILY["Qwen3-MoE"], tmp_path).folder, dtype=torch.float32)
    prompt, every = list(range(3, 43)), [EMBEDDINGS, *range(LAYERS)]
    want = reference.states(prompt, every)

    def far(seed: int, size: float) -> Any:
        states, picks = reference.shaken(prompt, every, size=size, seed=seed, passes=3)
        assert [len(each) for each in picks.values()] == [3 * len(prompt)] * LAYERS
        return torch.stack([states[each] - own for each, own in zip(every, want, strict=True)])

    one = far(0, 0.01)
    assert torch.equal(far(0, 0.01), one)
    assert not torch.equal(far(1, 0.01), one)
    assert not torch.equal(one[:, 0], one[:, 1]), "each pass has its own"
    lengths = one[1].norm(dim=-1) / want[1].norm(dim=-1)
    assert 0.002 < lengths.median() < 0.05
    assert all(torch.equal(now, then) for now, then in zip(reference.states(prompt, every), want, strict=True))
    with torch.inference_mode(), shaking(reference._layers, 0.01, spared=1):
        taken = reference._pass(prompt, every, times=2)
    torch.testing.assert_close(taken[3][0], want[-1])
    assert (taken[3][1] - want[-1]).norm() > 0.001 * want[-1].norm()


def _spread(**values: Any) -> Spread:
    nowhere = torch.full((5,), torch.inf)
    return Spread(
        **{
            "typical": torch.full([len(SHARES)], 0.1),
            "own": nowhere,
            "row_gap": nowhere,
            "layer_gap": nowhere,
            **values,
        }
    )


LEVEL = torch.tensor([False, True, False, True, False])
FAR = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.02])


def test_what_a_row_is_allowed() -> None:
    """Before the first level row the usual; level rows as far as the furthest of them; others as far as each."""
    allowed = _spread(level=LEVEL, far=FAR).allowed(0.05)
    torch.testing.assert_close(allowed, torch.tensor([0.05, SLACK * 0.3, SLACK * 0.2, SLACK * 0.3, 0.05]))
    torch.testing.assert_close(_spread(level=LEVEL & False, far=FAR).allowed(0.05), torch.full((5,), 0.05))


@pytest.mark.parametrize(("factor", "outside"), [(1.1, 0), (1.3, 5)])
def test_a_layer_as_a_whole_has_no_excuse(factor: float, outside: int) -> None:
    """Rows of which each alone could be so far off, if the others were not."""
    want = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    spread = _spread(level=LEVEL | True, far=FAR + 0.5)
    report = compare(
        [[(factor * want).bfloat16()]], [[want]], layer_ids=[7], prompts=[[1, 2, 3, 4, 5]], spreads={7: spread}
    )
    assert report.layers[0].outside == outside
    assert report.layers[0].excused == 5 - outside
    assert report.layers[0].level == 5


def test_what_noise_does_is_known_of_one_prompt() -> None:
    want = [[torch.randn(5, 8)], [torch.randn(5, 8)]]
    spread = _spread(level=LEVEL, far=FAR)
    with pytest.raises(ValueError, match="one prompt at a time"):
        compare(want, want, layer_ids=[0], spreads={0: spread})
