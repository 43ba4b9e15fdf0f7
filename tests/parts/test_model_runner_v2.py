"""Labels under Model Runner V2, which needs a GPU: a runner that keeps its books as vLLM's does.

Modelled on ``GPUModelRunner`` of ``vllm/v1/worker/gpu/model_runner.py`` (0.18 to 0.33): slots that only finished ids
free, one batch for each step, sorted by tokens, positions in a device buffer with padding behind, and the batch in
``execute_model_state`` until ``sample_tokens``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from vllm_compat.patches.worker.call import CallBook
from vllm_compat.patches.worker.labels import Label, check_runner, step_labels

PADDING = 5


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
    hidden_states: torch.Tensor


class Runner:
    """``decode_first``: the order of 0.26 and newer, which puts requests of one token first."""

    def __init__(self, *, decode_first: bool = False) -> None:
        self.decode_first = decode_first
        self.execute_model_state: ExecuteModelState | None = None
        self.free = list(range(4))
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed = torch.zeros(4, dtype=torch.int64)  # on the device; advanced when sampled

    def execute_model(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.free.append(self.slots.pop(name))
        for new in step.scheduled_new_reqs:
            self.slots[new.req_id] = self.free.pop()  # IndexError: no free indices
            self.tokens[new.req_id] = new.prefill_token_ids
            self.computed[self.slots[new.req_id]] = new.num_computed_tokens
        counts = step.num_scheduled_tokens
        if not counts:
            return
        ids = sorted(counts, key=(lambda i: (counts[i] != 1, counts[i])) if self.decode_first else counts.__getitem__)
        scheduled = np.array([counts[name] for name in ids])
        starts = np.full(8, scheduled.sum())
        starts[0] = 0
        starts[1 : len(ids) + 1] = np.cumsum(scheduled)
        computed = [int(self.computed[self.slots[name]]) for name in ids]
        positions = [at + row for at, count in zip(computed, scheduled, strict=True) for row in range(count)]
        rows = [
            self.tokens[name][at + row] for name, at in zip(ids, computed, strict=True) for row in range(counts[name])
        ]
        self.execute_model_state = ExecuteModelState(
            InputBatch(
                req_ids=ids,
                num_reqs=len(ids),
                num_scheduled_tokens=scheduled,
                query_start_loc_np=starts,
                num_computed_tokens_np=np.array(computed),
                positions=torch.tensor(positions + [0] * PADDING),
                input_ids=torch.tensor(rows + [0] * PADDING),
            ),
            hidden_states=torch.tensor(rows + [-1] * PADDING),  # the model: each row is its token
        )

    def sample_tokens(self) -> None:
        assert self.execute_model_state is not None
        batch = self.execute_model_state.input_batch
        for name, count in zip(batch.req_ids, batch.num_scheduled_tokens, strict=True):
            self.computed[self.slots[name]] += int(count)
        self.execute_model_state = None


def step(
    new: dict[str, tuple[list[int], int]], cached: dict[str, tuple[int, int]], finished: tuple[str, ...] = ()
) -> Any:
    """new: tokens and how many of them; cached: computed tokens and how many more."""
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0, prefill_token_ids=tokens)
            for name, (tokens, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[at for at, _ in cached.values()]
        ),
        finished_req_ids=finished,
    )


@pytest.mark.parametrize("decode_first", [False, True])
def test_rows_of_a_sorted_batch_reach_their_prompts_over_several_steps(decode_first: bool) -> None:
    lengths = {"a": 9, "b": 3, "c": 1, "d": 12, "e": 7, "f": 1}
    prompts = {name: [ord(name) * 100 + i for i in range(length)] for name, length in lengths.items()}
    runner, book = Runner(decode_first=decode_first), CallBook(list(lengths.items()))
    check_runner(runner)
    rows = torch.full((book.tokens,), -1)
    steps = [
        # 20 tokens a step, 4 slots, as the scheduler would cut them: d in three chunks, one of a single token
        step({"a": (prompts["a"], 9), "b": (prompts["b"], 3), "c": (prompts["c"], 1), "d": (prompts["d"], 7)}, {}),
        step({"e": (prompts["e"], 7)}, {"d": (7, 1)}, finished=("a", "b", "c")),
        step({"f": (prompts["f"], 1)}, {"d": (8, 4)}, finished=("e",)),
        step({}, {}, finished=("d", "f")),
    ]
    orders = []
    for each in steps:
        runner.execute_model(each)
        if each.num_scheduled_tokens:
            labels = step_labels(runner, each)
            orders.append([label.request_id for label in labels])
            assert runner.execute_model_state is not None
            for source, target, count in book.place(labels):
                rows[target : target + count] = runner.execute_model_state.hidden_states[source : source + count]
            runner.sample_tokens()
    book.check_complete()
    assert rows.tolist() == [token for tokens in prompts.values() for token in tokens]
    assert orders == [["c", "b", "d", "a"], ["d", "e"], ["f", "d"]]
    assert sorted(runner.free) == [0, 1, 2, 3]


def test_labels_are_what_the_forward_was_given() -> None:
    runner = Runner()
    runner.execute_model(step({"a": ([5, 6, 7], 2), "b": ([8], 1)}, {}))
    assert step_labels(runner, step({"a": ([5, 6, 7], 2), "b": ([8], 1)}, {})) == [Label("b", 0, 1), Label("a", 0, 2)]


def test_a_step_that_was_not_sampled_is_noticed() -> None:
    """V2 does not complain: the next chunk would be computed at the positions of the last one."""
    runner, prompt = Runner(), list(range(10))
    runner.execute_model(step({"a": (prompt, 4)}, {}))
    following = step({}, {"a": (4, 6)})
    runner.execute_model(following)
    with pytest.raises(RuntimeError, match=r"request a: the model runner is at token 0 .* scheduler sent token 4"):
        step_labels(runner, following)


def test_a_batch_of_other_requests_or_counts_is_refused() -> None:
    runner = Runner()
    runner.execute_model(step({"a": ([5, 6, 7], 3)}, {}))
    with pytest.raises(RuntimeError, match=r"the batch holds \['a'\], the scheduler sent \['b'\]"):
        step_labels(runner, step({"b": ([5, 6, 7], 3)}, {}))
    with pytest.raises(RuntimeError, match="computed 3, the scheduler sent token 0 and 2 to compute"):
        step_labels(runner, step({"a": ([5, 6, 7], 2)}, {}))


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
