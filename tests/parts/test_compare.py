"""`compare` finds every fault that was planted, and nothing where nothing is wrong."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_compat.extraction import kernels, rowwise
from vllm_compat.extraction.compare import compare
from vllm_compat.extraction.rowwise import tolerance

LAYERS = (2, 4, 7)
HIDDEN = 48
# Prompts 0 and 3 share their first twelve tokens.
PROMPTS = [
    [1, *range(100, 129)],
    [2, *range(200, 219)],
    [3, *range(300, 324)],
    [1, *range(100, 111), *range(400, 420)],
]


def _states(seed: int = 0) -> list[list[Any]]:
    """A stand-in for a causal model: a row depends on its tokens up to there, and on the layer before."""
    states: list[list[Any]] = []
    for prompt in PROMPTS:
        rows = []
        for end in range(1, len(prompt) + 1):
            generator = torch.Generator().manual_seed(hash((seed, *prompt[:end])) % 2**31)
            # A residual stream: each layer adds to the one before.
            rows.append(torch.randn(len(LAYERS), HIDDEN, generator=generator).cumsum(dim=0))
        states.append(list(torch.stack(rows, dim=1)))
    return states


WANT = _states()


def _got(noise: float = 0.01, dtype: Any = torch.bfloat16) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(7)
    return [
        [(layer * (1 + noise * torch.randn(layer.shape, generator=generator))).to(dtype) for layer in states]
        for states in WANT
    ]


def _compare(got: list[list[Any]]) -> Any:
    return compare(got, WANT, layer_ids=LAYERS, prompts=PROMPTS)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    report = _compare(_got())
    assert report.ok, report.problems
    assert report.rows == sum(map(len, PROMPTS))
    assert [layer.layer_id for layer in report.layers] == list(LAYERS)
    assert report.margin > 0.8
    for layer in report.layers:
        assert layer.rows == report.rows
        assert 0 < layer.max_relative_error < layer.tolerance
        assert layer.min_cosine > 0.999
        faults = (layer.not_finite, layer.outside, layer.misplaced, layer.wrong_layer, layer.undecided)
        assert faults == (0, 0, 0, 0, 0)
    assert report.as_dict()["ok"] is True
    assert "problem" not in report.as_text()


def test_equal_states_have_a_perfect_margin() -> None:
    report = compare(WANT, WANT, layer_ids=LAYERS, prompts=PROMPTS)
    assert report.ok
    assert report.margin == 1
    assert all(layer.max_abs_error == 0 for layer in report.layers)


def _swap(a: Any, i: int, b: Any, j: int) -> None:
    row = a[i].clone()
    a[i] = b[j]
    b[j] = row


def _swap_within(got: list[list[Any]]) -> None:
    for layer in got[1]:
        _swap(layer, 5, layer, 6)


def _swap_between(got: list[list[Any]]) -> None:
    for i in range(len(LAYERS)):
        _swap(got[0][i], 9, got[2][i], 9)


def _swap_in_one_layer(got: list[list[Any]]) -> None:
    _swap(got[0][1], 9, got[2][1], 9)


def _swap_prompts_after_common_prefix(got: list[list[Any]]) -> None:
    for i in range(len(LAYERS)):
        for row in range(12, 30):
            _swap(got[0][i], row, got[3][i], row)


def _shift(got: list[list[Any]]) -> None:
    got[2] = [layer.roll(1, dims=0) for layer in got[2]]


def _shift_one_layer(got: list[list[Any]]) -> None:
    got[2][2] = got[2][2].roll(-1, dims=0)


@pytest.mark.parametrize(
    ("plant", "rows", "said"),
    [
        (_swap_within, [2, 2, 2], "prompt 1 row 5 holds prompt 1 row 6"),
        (_swap_between, [2, 2, 2], "prompt 0 row 9 holds prompt 2 row 9"),
        (_swap_in_one_layer, [0, 2, 0], "prompt 0 row 9 holds prompt 2 row 9"),
        (_swap_prompts_after_common_prefix, [36, 36, 36], "prompt 0 row 12 holds prompt 3 row 12"),
        (_shift, [25, 25, 25], "prompt 2 row 1 holds prompt 2 row 0"),
        (_shift_one_layer, [0, 0, 25], "prompt 2 row 0 holds prompt 2 row 1"),
    ],
)
def test_misplaced_rows(plant: Callable[[list[list[Any]]], None], rows: list[int], said: str) -> None:
    got = _got()
    plant(got)
    report = _compare(got)
    assert not report.ok
    assert [layer.misplaced for layer in report.layers] == rows
    assert report.margin < 0
    assert any(said in problem for problem in report.problems), report.problems
    assert said in report.as_text()


def test_all_rows_swapped_do_not_excuse_each_other() -> None:
    """Noise is measured; where everything is wrong the measure itself must not make it right."""
    got = _got()
    got = [[layer.flip(0) for layer in states] for states in got]
    report = _compare(got)
    assert not report.ok
    assert all(layer.misplaced + layer.undecided > 0.9 * report.rows for layer in report.layers)
    assert all(layer.undecided == 0 for layer in report.layers)


def test_rows_of_a_common_prefix_do_not_compete() -> None:
    """Prompts 0 and 3 begin alike: their first rows are each other's by right."""
    got = _got()
    for i in range(len(LAYERS)):
        for row in range(12):
            _swap(got[0][i], row, got[3][i], row)
    assert _compare(got).ok


def test_without_the_prompts_a_common_prefix_is_undecided_not_misplaced() -> None:
    report = compare(_got(), WANT, layer_ids=LAYERS)
    assert all(layer.misplaced == 0 for layer in report.layers)
    assert all(layer.undecided > 0 for layer in report.layers)


def test_states_of_another_layer() -> None:
    got = _got()
    for states in got:
        states[1] = states[0].clone()
    report = _compare(got)
    assert not report.ok
    assert [layer.wrong_layer for layer in report.layers] == [0, report.rows, 0]
    assert report.layers[1].layer_margin < 0
    assert any("is like layer 2" in problem for problem in report.problems)


def test_layers_in_the_wrong_order() -> None:
    got = [[states[1], states[0], states[2]] for states in _got()]
    report = _compare(got)
    assert [layer.wrong_layer for layer in report.layers] == [report.rows, report.rows, 0]


def _residual_stream(step: float) -> list[Any]:
    """Layers 30, 31 and 32 of one prompt, each of which adds little to the one before, as in a deep model."""
    generator = torch.Generator().manual_seed(3)
    layers = [torch.randn(40, HIDDEN, generator=generator)]
    for _ in range(2):
        layers.append(layers[-1] + step * torch.randn(40, HIDDEN, generator=generator))
    return layers


@pytest.mark.parametrize(("plant", "wrong"), [(0, 0), (1, 40), (-1, 40)])
def test_a_neighbour_within_the_tolerance_is_told_apart(plant: int, wrong: int) -> None:
    """Layers of deep models differ by less than rounding may cost in all; a rival tells them apart all the same."""
    layers = _residual_stream(0.08)
    noise = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(4)) * 0.01
    got = [[(layers[1 + plant] + noise).bfloat16()]]
    want, rivals = [[layers[1]]], {30: [layers[0]], 32: [layers[2]]}
    assert compare(got, want, layer_ids=[31]).ok, "within the tolerance: alone it cannot be told"
    report = compare(got, want, layer_ids=[31], rivals=rivals)
    assert report.layers[0].wrong_layer == wrong
    assert report.ok == (plant == 0)
    if plant:
        assert f"is like layer {31 + plant}" in report.problems[0]


def test_findings_row_by_row() -> None:
    got = _got()
    _swap(got[1][0], 5, got[1][0], 6)
    got[0][0][3, 0] = math.nan
    (found, *_) = _compare(got).found
    first = len(PROMPTS[0])
    assert (~found.finite).nonzero().flatten().tolist() == [3]
    wrong = found.wrong
    assert found.place[wrong].tolist() == [first + 5, first + 6]
    assert found.nearest[wrong].tolist() == [first + 6, first + 5]


def test_one_row_of_another_layer() -> None:
    got = _got()
    got[3][2][4] = got[3][0][4]
    report = _compare(got)
    assert [layer.wrong_layer for layer in report.layers] == [0, 0, 1]
    assert any("prompt 3 row 4 is like layer 2" in problem for problem in report.problems)


def test_the_last_layer_after_the_final_norm() -> None:
    """What `output_hidden_states` gives as its last entry."""
    got = _got()
    weight = 1 + 0.25 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    for states in got:
        last = states[-1].float()
        states[-1] = (weight * last / last.square().mean(dim=1, keepdim=True).sqrt()).bfloat16()
    report = _compare(got)
    assert not report.ok
    assert [layer.outside for layer in report.layers] == [0, 0, report.rows]
    assert any("layer 7" in problem and "of their length" in problem for problem in report.problems)


def test_a_scale_alone_is_outside_the_tolerance() -> None:
    got = [[layer * 1.2 for layer in states] for states in _got()]
    report = _compare(got)
    assert all(layer.outside == report.rows for layer in report.layers)
    assert all(layer.min_cosine > 0.999 for layer in report.layers)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    got = _got()
    got[1][1][3, 5] = value
    report = _compare(got)
    assert not report.ok
    assert [layer.not_finite for layer in report.layers] == [0, 1, 0]
    assert any("prompt 1 row 3" in problem and "finite" in problem for problem in report.problems)
    # The others are still judged, and right.
    assert report.layers[1].rows == report.rows
    assert report.layers[1].max_relative_error < report.layers[1].tolerance


def test_nothing_but_nan() -> None:
    report = _compare([[torch.full_like(layer, math.nan) for layer in states] for states in _got()])
    assert not report.ok
    assert all(layer.not_finite == report.rows for layer in report.layers)
    assert all(layer.row_margin is None for layer in report.layers)
    report.as_text()


def test_a_missing_row() -> None:
    got = _got()
    got[2][1] = got[2][1][:-1]
    report = _compare(got)
    assert report.problems == ("prompt 2, layer 4: shape (24, 48), expected (25, 48)",)
    assert report.layers[1].rows == report.rows - 25


def test_one_row_for_each_layer_of_a_prompt() -> None:
    """What the circulating `is None` fix yields: the reply's first layer, taken for the list of layers."""
    got = _got()
    got[0] = list(got[0][0])
    report = _compare(got)
    assert not report.ok
    assert "prompt 0: 30 layers, expected 3" in report.problems


def test_a_missing_layer_and_a_missing_prompt() -> None:
    got = _got()
    got[1] = got[1][:-1]
    del got[3]
    report = _compare(got)
    assert set(report.problems) == {"3 prompts, expected 4", "prompt 1: 2 layers, expected 3"}


def test_nothing_at_all() -> None:
    report = _compare([])
    assert not report.ok
    assert report.layers == ()
    assert report.margin is None


def test_a_single_row_has_nothing_to_be_mixed_up_with() -> None:
    want = [[WANT[0][0][:1]]]
    report = compare([[want[0][0].bfloat16()]], want, layer_ids=[2], prompts=[[1]])
    assert report.ok
    assert (report.layers[0].row_margin, report.layers[0].layer_margin) == (None, None)
    assert " - " in report.as_text()


def test_indistinguishable_rows_are_a_problem_when_there_are_many() -> None:
    row = torch.ones(1, HIDDEN)
    want = [[torch.cat([row * 1.0001**i for i in range(8)])]]
    got = [[row.expand(8, -1).bfloat16()]]
    report = compare(got, want, layer_ids=[0], prompts=[list(range(8))])
    assert report.layers[0].misplaced == 0
    assert any("cannot be told from another" in problem for problem in report.problems)
    assert compare(got, want, layer_ids=[0], prompts=[list(range(8))], undecided_share=1).ok


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    got = _got()
    _swap_between(got)
    whole = _compare(got).as_dict()
    monkeypatch.setattr(rowwise, "_CHUNK", 7)
    parts = _compare(got).as_dict()
    assert parts["problems"] == whole["problems"]
    assert parts["margin"] == pytest.approx(whole["margin"], abs=1e-5)


def test_tolerance_follows_dtype_and_depth() -> None:
    assert tolerance(torch.bfloat16, 0) == 8 / 256
    assert tolerance(torch.bfloat16, 3) == 2 * tolerance(torch.bfloat16, 0)
    assert tolerance(torch.bfloat16, 3, 2.0) == 2 * tolerance(torch.bfloat16, 3)
    assert tolerance(torch.float32, 0) < tolerance(torch.float16, 0) < tolerance(torch.bfloat16, 0)
    with pytest.raises(ValueError, match="float64"):
        tolerance(torch.float64, 0)


def test_a_reference_that_does_not_fit_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="one tensor per layer id"):
        compare([], [], layer_ids=LAYERS)
    with pytest.raises(ValueError, match="one tensor per layer id"):
        compare(WANT, WANT, layer_ids=(1, 2))
    with pytest.raises(ValueError, match="as many rows"):
        compare(WANT, WANT, layer_ids=LAYERS, prompts=[prompt[:-1] for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("device", "calls", "expected"), [("cpu", "cuda", 2), ("cpu", "native", 1), ("cuda", "cuda", 1)]
)
def test_kernels_that_drop_bits_are_known_by_their_call(
    device: str, calls: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the two modules of vLLM that are looked at; the real ones are in the live lanes."""
    forms: dict[str, Any] = {"cuda": lambda self: self.forward_cuda(), "native": lambda self: self.forward_native()}
    modules = {
        "vllm": types.SimpleNamespace(),
        "vllm.model_executor": types.SimpleNamespace(),
        "vllm.model_executor.custom_op": types.SimpleNamespace(
            CustomOp=types.SimpleNamespace(forward_cpu=forms[calls])
        ),
        "vllm.platforms": types.SimpleNamespace(current_platform=types.SimpleNamespace(is_cpu=lambda: device == "cpu")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert kernels.cut() == expected


@pytest.mark.parametrize("step", [0.01, 0.02, 0.05])  # of what the noise is: half, as much, 2.5 times
def test_layers_that_differ_by_less_than_the_noise_are_told_by_all_their_rows(step: float) -> None:
    """In a deep model a layer adds little. One row may be on the wrong side by accident, not all of them."""
    generator = torch.Generator().manual_seed(3)

    def drawn() -> Any:
        return torch.randn(100, 1024, generator=generator)

    levels = [drawn()]
    for _ in range(4):
        levels.append(levels[-1] + step * drawn())

    def judged(held: int) -> Any:
        got = (levels[held] * (1 + 0.02 * drawn())).bfloat16()
        rivals = {layer: [levels[layer]] for layer in (1, 3)}
        return compare([[got]], [[levels[2]]], layer_ids=[2], rivals=rivals, undecided_share=1)

    assert judged(2).ok
    report = judged(3)
    assert not report.ok
    assert report.layers[0].wrong_layer == 100
    assert "are nearer to another layer: prompt 0 row 0 is like layer 3" in report.problems[0]


def test_layers_that_are_the_same_are_no_fault() -> None:
    """A layer that adds nothing."""
    generator = torch.Generator().manual_seed(3)
    same = torch.randn(100, 64, generator=generator)
    got = (same * (1 + 0.02 * torch.randn(100, 64, generator=generator))).bfloat16()
    report = compare([[got]], [[same]], layer_ids=[2], rivals={1: [same], 3: [same]}, undecided_share=1)
    assert report.ok, report.problems
    assert report.layers[0].undecided == 100
