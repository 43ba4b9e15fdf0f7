"""Capture under Model Runner V2, which needs a GPU: a runner that keeps its books as vLLM's does.

Modelled on ``GPUModelRunner`` of ``vllm/v1/worker/gpu/model_runner.py`` (0.18 to 0.33): slots that only finished ids
free, one batch for each step, sorted by tokens, made by ``prepare_inputs``, and positions in a device buffer with
padding behind that the next step writes over.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from vllm_compat.patches.worker import capture as module
from vllm_compat.patches.worker.capture import Capture
from vllm_compat.patches.worker.labels import Label, check_runner, step_labels

PADDING = 5
LAYERS = 3


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    num_scheduled_tokens: np.ndarray
    query_start_loc_np: np.ndarray  # room for padded requests behind
    num_computed_tokens_np: np.ndarray  # the scheduler's
    positions: torch.Tensor  # what the forward gets; padding behind
    input_ids: torch.Tensor


class ExecuteModelState(NamedTuple):
    input_batch: InputBatch


class Layer(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 0.25


class Model(torch.nn.Module):
    """The rows after layer i: the token, that plus one, both plus (i + 1) / 4."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.model.norm = torch.nn.Identity()

    def forward(self, input_ids: torch.Tensor) -> None:
        rows = input_ids[:, None] + torch.arange(2.0)
        for layer in self.model.layers:
            rows = layer(rows)
        self.model.norm(rows)


class Runner:
    """``decode_first``: the order of 0.26 and newer, which puts requests of one token first."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, decode_first: bool = False) -> None:
        self.decode_first = decode_first
        self.execute_model_state: ExecuteModelState | None = None
        self.free = list(range(4))
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed = torch.zeros(4, dtype=torch.int64)  # on the device; advanced when sampled
        self.positions = torch.zeros(64, dtype=torch.int64)
        self.model = Model()
        self.orders: list[list[str]] = []

    def get_model(self) -> Model:
        return self.model

    def execute_model(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.free.append(self.slots.pop(name))
        for new in step.scheduled_new_reqs:
            self.slots[new.req_id] = self.free.pop()  # IndexError: no free indices
            self.tokens[new.req_id] = new.prefill_token_ids
            self.computed[self.slots[new.req_id]] = new.num_computed_tokens
        if not step.num_scheduled_tokens:
            return
        batch = self.prepare_inputs(step)
        self.model(batch.input_ids)
        self.execute_model_state = ExecuteModelState(batch)

    def prepare_inputs(self, step: Any) -> InputBatch:
        counts = step.num_scheduled_tokens
        ids = sorted(counts, key=(lambda i: (counts[i] != 1, counts[i])) if self.decode_first else counts.__getitem__)
        self.orders.append(ids)
        scheduled = np.array([counts[name] for name in ids])
        starts = np.full(8, scheduled.sum())
        starts[0] = 0
        starts[1 : len(ids) + 1] = np.cumsum(scheduled)
        computed = [int(self.computed[self.slots[name]]) for name in ids]
        positions = [at + row for at, count in zip(computed, scheduled, strict=True) for row in range(count)]
        rows = [
            self.tokens[name][at + row] for name, at in zip(ids, computed, strict=True) for row in range(counts[name])
        ]
        self.positions[: len(rows)] = torch.tensor(positions)
        return InputBatch(
            req_ids=ids,
            num_reqs=len(ids),
            num_scheduled_tokens=scheduled,
            query_start_loc_np=starts,
            num_computed_tokens_np=np.array(computed),
            positions=self.positions[: len(rows) + PADDING],
            input_ids=torch.tensor(rows + [0] * PADDING),
        )

    def sample_tokens(self) -> None:
        assert self.execute_model_state is not None
        batch = self.execute_model_state.input_batch
        for name, count in zip(batch.req_ids, batch.num_scheduled_tokens, strict=True):
            self.computed[self.slots[name]] += int(count)
        self.execute_model_state = None


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank's capture around a runner, as the worker extension makes it."""
    monkeypatch.setattr(module, "_is_first_rank", lambda worker: True)
    text = SimpleNamespace(num_hidden_layers=LAYERS)

    def around(runner: Any) -> Capture:
        config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
        return Capture(SimpleNamespace(rank=0, model_runner=runner, vllm_config=config), [0, 2])

    return around


def call(**lengths: int) -> dict[str, Any]:
    return {"call": 1, "requests": list(lengths.items()), "describe": False, "nonfinite": "error"}


def step(
    new: dict[str, tuple[list[int], int]], cached: dict[str, tuple[int, int]], finished: tuple[str, ...] = ()
) -> Any:
    """new: tokens and how many of them; cached: computed tokens and how many more."""
    counts = {name: count for name, (_, count) in (new | cached).items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0, prefill_token_ids=tokens)
            for name, (tokens, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[at for at, _ in cached.values()]
        ),
        finished_req_ids=finished,
    )


def tokens(name: str, count: int) -> list[int]:
    return [ord(name) * 100 + i for i in range(count)]


@pytest.mark.parametrize("decode_first", [False, True])
def test_rows_of_a_sorted_batch_reach_their_prompts_over_several_steps(decode_first: bool, capture: Any) -> None:
    lengths = {"a": 9, "b": 3, "c": 1, "d": 12, "e": 7, "f": 1}
    prompts = {name: tokens(name, length) for name, length in lengths.items()}
    runner = Runner(decode_first=decode_first)
    captured = capture(runner)
    captured.begin_call(call(**lengths))
    steps = [
        # 20 tokens a step, 4 slots, as the scheduler would cut them: d in three chunks, one of a single token
        step({"a": (prompts["a"], 9), "b": (prompts["b"], 3), "c": (prompts["c"], 1), "d": (prompts["d"], 7)}, {}),
        step({"e": (prompts["e"], 7)}, {"d": (7, 1)}, finished=("a", "b", "c")),
        step({"f": (prompts["f"], 1)}, {"d": (8, 4)}, finished=("e",)),
        step({}, {}, finished=("d", "f")),
    ]
    for each in steps:
        runner.execute_model(each)
        if each.num_scheduled_tokens:
            runner.sample_tokens()
    expected = torch.tensor([token for each in prompts.values() for token in each])[:, None] + torch.arange(2.0)
    first, last = captured.hand_over()
    assert torch.equal(first, expected + 0.25)
    assert torch.equal(last, expected + 0.75)
    assert runner.orders == [["c", "b", "d", "a"], ["d", "e"], ["f", "d"]]
    assert sorted(runner.free) == [0, 1, 2, 3]


def test_rows_leave_while_the_model_runs(capture: Any) -> None:
    runner = Runner()
    captured = capture(runner)
    captured.begin_call(call(a=3))
    left: list[str] = []
    add = captured._copies.add
    captured._copies.add = lambda *args: (left.append("copy"), add(*args))
    runner.model.model.norm.register_forward_hook(lambda *args: left.append("norm"))
    runner.execute_model(step({"a": (tokens("a", 3), 3)}, {}))
    assert left == ["copy", "copy", "norm"]


def test_a_step_that_was_not_sampled_is_noticed(capture: Any) -> None:
    """V2 does not complain: the next chunk is computed at the positions of the last one."""
    runner = Runner()
    captured = capture(runner)
    captured.begin_call(call(b=2, a=10))
    runner.execute_model(step({"a": (tokens("a", 10), 4), "b": (tokens("b", 2), 2)}, {}))
    runner.execute_model(step({}, {"a": (4, 6)}, finished=("b",)))
    with pytest.raises(RuntimeError, match=r"prompt 1 \(request a\): the model runner computed row 4 at position 0$"):
        captured.hand_over()


def test_positions_of_an_earlier_call_say_nothing_of_this_one(capture: Any) -> None:
    runner = Runner()
    captured = capture(runner)
    captured.begin_call(call(a=4))
    runner.execute_model(step({"a": (tokens("a", 4), 4)}, {}))
    runner.sample_tokens()
    captured.hand_over()
    captured.begin_call(call(b=4))
    runner.execute_model(step({"b": (tokens("b", 4), 2)}, {}))
    runner.execute_model(step({}, {"b": (2, 2)}))
    with pytest.raises(RuntimeError, match="computed row 2 at position 0"):
        captured.hand_over()


def test_a_runner_that_makes_no_batch_is_an_error(capture: Any) -> None:
    class Other(Runner):
        def execute_model(self, step: Any) -> None:
            self.model(torch.tensor([5, 6, 7]))

    runner = Other()
    captured = capture(runner)
    captured.begin_call(call(a=3))
    runner.execute_model(step({"a": ([5, 6, 7], 3)}, {}))
    with pytest.raises(RuntimeError, match="Other ran the model without prepare_inputs"):
        captured.hand_over()


def test_a_batch_of_other_requests_or_counts_is_refused() -> None:
    runner, given = Runner(), step({"a": ([5, 6, 7], 3)}, {})
    runner.execute_model(given)
    assert runner.execute_model_state is not None
    batch = runner.execute_model_state.input_batch
    assert step_labels(runner, given, batch) == [Label("a", 0, 3)]
    with pytest.raises(RuntimeError, match=r"the batch holds \['a'\], the scheduler sent \['b'\]"):
        step_labels(runner, step({"b": ([5, 6, 7], 3)}, {}), batch)
    with pytest.raises(RuntimeError, match="computed 3, the scheduler sent token 0 and 2 to compute"):
        step_labels(runner, step({"a": ([5, 6, 7], 2)}, {}), batch)


def test_the_runner_that_is_installed_is_understood_or_refused_by_name() -> None:
    """V2 exists from vLLM 0.12 on; up to 0.17 its state is a tuple without names."""
    if importlib.util.find_spec("vllm.v1.worker.gpu") is None:
        assert importlib.util.find_spec("vllm.v1.worker.gpu_model_runner") is not None
        return
    from vllm.v1.worker.gpu import model_runner

    runner = object.__new__(model_runner.GPUModelRunner)
    if hasattr(model_runner, "ExecuteModelState"):
        check_runner(runner)
    else:
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            check_runner(runner)
