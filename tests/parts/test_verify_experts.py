"""`verify` of mixtures of experts: rows that a router may as well send elsewhere are right, planted faults are found.

The files hold what Hugging Face computes in float32, rounded to bfloat16, for prompts that nobody has chosen; `verify`
recomputes in bfloat16. So roundings fall otherwise, as in another implementation, and some tokens go to other experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_files import random_prompt, save_sample
from zoo.build import build
from zoo.families import FAMILY

from vllm_compat.extraction import repeats
from vllm_compat.extraction.reference import EMBEDDINGS, Reference
from vllm_compat.extraction.repeats import FIRST, Judged, Repeats
from vllm_compat.extraction.rowwise import tolerance
from vllm_compat.extraction.tiny import make_model
from vllm_compat.extraction.verification import Options, verify

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER_IDS = [0, 1, 2, 3]
LENGTHS = (120, 90, 120)
_MANY = {"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
MODELS = {
    "Mixtral": FAMILY["Mixtral"],
    "Qwen3-MoE": FAMILY["Qwen3-MoE"],
    "DeepSeek-V3": replace(FAMILY["DeepSeek-V3"], values={**FAMILY["DeepSeek-V3"].values, **_MANY}),
}


PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@dataclass(frozen=True)
class Model:
    folder: Path

    @cached_property
    def exact(self) -> Reference:
        return Reference(self.folder, dtype=torch.float32)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.folder, dtype=torch.bfloat16)

    @cached_property
    def states(self) -> list[list[Any]]:
        """By prompt and layer, as another implementation computes them."""
        return [[each.bfloat16() for each in self.exact.states(prompt, LAYER_IDS)] for prompt in PROMPTS]

    @cached_property
    def furthest(self) -> list[int]:
        """The two rows of the first prompt that are furthest off in the last layer."""
        want = self.reference.states(PROMPTS[0], LAYER_IDS)[-1].float()
        return ((self.states[0][-1].float() - want).norm(dim=1) / want.norm(dim=1)).topk(2).indices.tolist()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build(MODELS[request.param], tmp_path_factory.mktemp(request.param)).folder)


def _write(folder: Path, states: list[list[Any]]) -> Path:
    for number, (prompt, layers) in enumerate(zip(PROMPTS, states, strict=True)):
        save_sample(folder, number, prompt, [each.clone() for each in layers])
    return folder


def _verify(model: Model, folder: Path) -> Any:
    return verify(Options(model=str(model.folder), folder=folder, layer_ids=tuple(LAYER_IDS)))


def test_rows_that_went_to_other_experts_are_right(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, model.states)
    verdict = _verify(model, tmp_path)
    assert verdict.ok, verdict.as_text()
    last = verdict.report.layers[-1]
    assert last.level >= last.excused > 0
    assert last.tolerance < last.max_relative_error <= last.allowed
    assert f"note: {last.level} of {sum(LENGTHS)} rows: experts nearly level" in verdict.as_text()
    assert verdict.as_dict()["layers"][-1]["level"] == last.level
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "routers", ())
        verdict = _verify(model, tmp_path)
    assert not verdict.ok, "with the fixed tolerance alone these data are called wrong"
    assert {group.fault.kind for group in verdict.faults.groups} <= {"inexact", "unexplained"}


def _swap(model: Model, layers: list[Any]) -> None:
    one, other = model.furthest
    for each in layers:
        each[[one, other]] = each[[other, one]]


def _swap_in_one_layer(model: Model, layers: list[Any]) -> None:
    _swap(model, layers[2:3])


def _shift(model: Model, layers: list[Any]) -> None:
    layers[:] = [each.roll(1, dims=0) for each in layers]


def _another_layer(model: Model, layers: list[Any]) -> None:
    layers[3] = layers[2].clone()


def _row_of_another_layer(model: Model, layers: list[Any]) -> None:
    layers[3][model.furthest[0]] = layers[2][model.furthest[0]]


def _another_prompt(model: Model, layers: list[Any]) -> None:
    layers[:] = model.states[2]


def _rows_of_another_prompt(model: Model, layers: list[Any]) -> None:
    for each, other in zip(layers, model.states[2], strict=True):
        each[60:90] = other[60:90]


def _multiply(model: Model, layers: list[Any]) -> None:
    layers[3] = 1.5 * layers[3]


def _imprecise(model: Model, layers: list[Any]) -> None:
    noise = torch.randn(layers[3].shape, generator=torch.Generator().manual_seed(2))
    layers[3] = (layers[3] + 0.2 * layers[3].float().std() * noise).bfloat16()


def _normed(model: Model, layers: list[Any]) -> None:
    layers[3] = model.exact.normed(layers[3].float()).bfloat16()


@pytest.mark.parametrize(
    ("plant", "kind", "layer_ids"),
    [
        (_swap, "swapped-rows", LAYER_IDS),
        (_swap_in_one_layer, "swapped-rows", [2]),
        (_shift, "shifted-rows", LAYER_IDS),
        (_another_layer, "wrong-layer", [3]),
        (_row_of_another_layer, "wrong-layer", [3]),
        (_another_prompt, "other-prompt", LAYER_IDS),
        (_rows_of_another_prompt, "other-prompt", LAYER_IDS),
        (_multiply, "scaled", [3]),
        (_imprecise, "inexact", [3]),
        (_normed, "normed", [3]),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[Model, list[Any]], None], kind: str, layer_ids: list[int], model: Model, tmp_path: Path
) -> None:
    layers = [each.clone() for each in model.states[0]]
    plant(model, layers)
    verdict = _verify(model, _write(tmp_path, [layers, *model.states[1:]]))
    assert not verdict.ok
    named = [group for group in verdict.faults.groups if group.fault.kind == kind]
    assert {layer for group in named for layer in group.fault.layer_ids} >= set(layer_ids), verdict.as_text()
    assert all(group.files == ["data_0.pt"] for group in verdict.faults.groups), "the others are as right as before"


def test_a_layer_multiplied_by_less(model: Model, tmp_path: Path) -> None:
    """How fine it is: a fifth too much in a whole layer is found, however far single rows may be off."""
    layers = [*model.states[0][:3], 1.2 * model.states[0][3]]
    verdict = _verify(model, _write(tmp_path, [layers, *model.states[1:]]))
    assert [group.fault.kind for group in verdict.faults.groups if group.fault.kind == "scaled"], verdict.as_text()


@pytest.mark.parametrize("factor", [0.75, 1.3])
def test_half_a_layer_multiplied(factor: float, model: Model, tmp_path: Path) -> None:
    """The middle row is right, and each row may be as far off as the furthest: the share of such rows tells."""
    wrong = []
    for states in model.states:
        last = states[3].clone()
        last[len(last) * 55 // 100 :] *= factor
        wrong.append([*states[:3], last])
    assert not _verify(model, _write(tmp_path, wrong)).ok


def test_what_is_within_the_tolerance_costs_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Reference, "shaken")
    monkeypatch.delattr(Reference, "picks")
    right = [model.reference.states(prompt, LAYER_IDS) for prompt in PROMPTS]
    verdict = _verify(model, _write(tmp_path, right))
    assert verdict.ok
    assert all(layer.level == 0 and layer.allowed == layer.tolerance for layer in verdict.report.layers)
    assert "experts" not in verdict.as_text()


def test_a_dense_model_is_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Reference, "shaken")
    monkeypatch.delattr(Reference, "picks")
    model = Model(make_model(tmp_path / "llama", layers=len(LAYER_IDS), dtype="bfloat16"))
    assert model.reference.routers == ()
    layers = [1.2 * each for each in model.states[0]]
    (tmp_path / "data").mkdir()
    verdict = _verify(model, _write(tmp_path / "data", [layers, *model.states[1:]]))
    assert [group.fault.kind for group in verdict.faults.groups] == ["scaled"]


def test_repetitions_end_where_the_whole_layer_is_off(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    shaken = Reference.shaken
    monkeypatch.setattr(
        Reference, "shaken", lambda *args, **kwargs: made.append(kwargs["passes"]) or shaken(*args, **kwargs)
    )
    wrong = [[3 * each for each in states] for states in model.states]
    assert not _verify(model, _write(tmp_path, wrong)).ok
    assert sum(made) == FIRST * len(PROMPTS)


def test_repetitions_add_up(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them only allow more; a short batch is as good as a long one."""
    prompt = PROMPTS[0]
    rows = torch.arange(len(prompt))
    judged = {
        layer_id: Judged(got=got, want=want, nearest=rows.roll(1), layer_like=torch.full_like(rows, EMBEDDINGS))
        for layer_id, got, want in zip(
            LAYER_IDS, model.states[0], model.reference.states(prompt, LAYER_IDS), strict=True
        )
    }
    some = Repeats(model.reference, prompt, judged, tolerance(torch.bfloat16, 0))
    before = {layer_id: spread.allowed(0.01) for layer_id, spread in some.more().items()}
    assert some.count == FIRST
    after = some.more()
    assert some.count == 2 * FIRST
    assert all((after[layer_id].allowed(0.01) >= before[layer_id]).all() for layer_id in LAYER_IDS)
    assert any((after[layer_id].allowed(0.01) > before[layer_id]).any() for layer_id in LAYER_IDS)
    level = torch.stack([after[layer_id].level for layer_id in LAYER_IDS]).int()
    assert (level.diff(dim=0) >= 0).all(), "a row that went elsewhere stays another vector"
    passes = []
    shaken = Reference.shaken
    monkeypatch.setattr(
        Reference, "shaken", lambda *args, **kwargs: passes.append(kwargs["passes"]) or shaken(*args, **kwargs)
    )
    monkeypatch.setattr(repeats, "_TOKENS", 3 * len(prompt) + 1)
    spreads = Repeats(model.reference, prompt, judged, tolerance(torch.bfloat16, 0)).more()
    assert passes == [3, 3, 2]
    assert spreads[3].typical.tolist() == pytest.approx(after[3].typical.tolist(), rel=0.5)
