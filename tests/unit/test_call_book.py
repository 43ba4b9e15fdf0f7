"""The book of one call, driven by a model of the scheduler: every row lands in its place, or an error."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.patches.worker.call import CallBook, Span
from vllm_compat.patches.worker.labels import Label


@dataclass
class SchedulerModel:
    """What a scheduler may do: chunks of any size within a budget, any order in the batch, preemption at any time."""

    lengths: list[int]
    computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.computed = [0] * len(self.lengths)

    def step(self, budget: int, draw: st.DataObject) -> list[Label]:
        waiting = [i for i, length in enumerate(self.lengths) if self.computed[i] < length]
        labels = []
        for index in draw.draw(st.permutations(waiting)):
            if budget == 0:
                break
            count = draw.draw(st.integers(1, min(budget, self.lengths[index] - self.computed[index])))
            labels.append(Label(f"r{index}", self.computed[index], count))
            self.computed[index] += count
            budget -= count
        return labels

    def preempt(self, index: int) -> None:
        self.computed[index] = 0

    @property
    def done(self) -> bool:
        return self.computed == self.lengths


def rows_of(labels: list[Label]) -> list[tuple[str, int]]:
    """A step's "hidden states": each row says which token it is."""
    return [(name, position + i) for name, position, count in labels for i in range(count)]


def write(target: list[tuple[str, int] | None], labels: list[Label], spans: list[Span]) -> None:
    rows = rows_of(labels)
    for span in spans:
        target[span.target : span.target + span.count] = rows[span.source : span.source + span.count]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 64), data=st.data())
def test_every_row_lands_at_its_request_and_position(lengths: list[int], budget: int, data: st.DataObject) -> None:
    scheduler = SchedulerModel(lengths)
    book = CallBook([(f"r{i}", length) for i, length in enumerate(lengths)])
    target: list[tuple[str, int] | None] = [None] * sum(lengths)
    preemptions = data.draw(st.integers(0, 3))
    while not scheduler.done:
        labels = scheduler.step(budget, data)
        write(target, labels, book.place(labels))
        unfinished = [i for i, n in enumerate(lengths) if 0 < scheduler.computed[i] < n]
        if preemptions and unfinished:
            scheduler.preempt(data.draw(st.sampled_from(unfinished)))
            preemptions -= 1
    book.check_complete()
    assert target == [(f"r{i}", position) for i, length in enumerate(lengths) for position in range(length)]


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 64), data=st.data())
def test_a_faulty_step_is_an_error(lengths: list[int], budget: int, data: st.DataObject) -> None:
    """One step of the run loses rows, skips ahead, or belongs to somebody else: never a complete call."""
    scheduler = SchedulerModel(lengths)
    book = CallBook([(f"r{i}", length) for i, length in enumerate(lengths)])
    steps = []
    while not scheduler.done:
        steps.append(scheduler.step(budget, data))
    broken = data.draw(st.integers(0, len(steps) - 1))
    fault = data.draw(st.sampled_from(["lost step", "short", "skipped", "stranger", "too long"]))
    name, position, count = steps[broken][0]
    if fault == "lost step":
        steps[broken] = steps[broken][1:]
    elif fault == "short":
        steps[broken][0] = Label(name, position, count - 1)
    elif fault == "skipped":
        steps[broken][0] = Label(name, position + 1, count - 1)
    elif fault == "stranger":
        steps[broken][0] = Label("somebody", position, count)
    else:
        steps[broken][0] = Label(name, position, lengths[int(name[1:])] + 1)
    with pytest.raises(RuntimeError, match="vllm_compat"):  # noqa: PT012 - either half may see it
        for labels in steps:
            book.place(labels)
        book.check_complete()


def test_neighbours_are_one_copy() -> None:
    book = CallBook([("a", 3), ("b", 2), ("c", 4)])
    assert book.place([Label("a", 0, 3), Label("b", 0, 2), Label("c", 0, 4)]) == [Span(0, 0, 9)]
    book = CallBook([("a", 3), ("b", 2), ("c", 4)])
    assert book.place([Label("b", 0, 2), Label("a", 0, 3), Label("c", 0, 4)]) == [
        Span(0, 3, 2),
        Span(2, 0, 3),
        Span(5, 5, 4),
    ]


def test_errors_name_prompt_request_expected_and_got() -> None:
    book = CallBook([("req_0_0", 5), ("req_0_1", 7)])
    with pytest.raises(RuntimeError, match=r"prompt 1 \(request req_0_1\): rows 0 to 3 were skipped"):
        book.place([Label("req_0_1", 4, 3)])
    with pytest.raises(RuntimeError, match=r"prompt 0 \(request req_0_0\): expected 5 rows, got 6"):
        book.place([Label("req_0_0", 0, 6)])
    book.place([Label("req_0_0", 0, 5), Label("req_0_1", 0, 6)])
    with pytest.raises(RuntimeError, match=r"prompt 1 \(request req_0_1\): expected 7 rows, got 6"):
        book.check_complete()
    assert book.owner(5) == ("prompt 1 (request req_0_1)", 0)


def test_request_ids_must_be_unique() -> None:
    with pytest.raises(ValueError, match="not unique"):
        CallBook([("a", 1), ("a", 2)])
