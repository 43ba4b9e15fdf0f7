"""Two ranks: rank 0 hands over, every rank is proven, and the first error is not lost between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Prompts = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def extraction(model: Path, extract: Callable[..., Any]) -> Any:
    return extract(model, [0, 3, 5], max_model_len=512, tensor_parallel_size=2)


def test_rows_are_right_over_several_steps(extraction: Any, prompts_of: Prompts) -> None:
    for _ in range(2):
        extraction.check(prompts_of(*[511] * 20, 3, 40, 1))


def test_every_rank_has_reported(extraction: Any) -> None:
    import vllm_compat

    pids = {worker.proc.pid for worker in extraction.generator.executor.workers}
    reports = [report for report in vllm_compat.status()["workers"] if report["pid"] in pids]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert len({report["fingerprint"] for report in reports}) == 1


def test_tables_of_both_ranks_stay_empty(extraction: Any, prompts_of: Prompts) -> None:
    for _ in range(20):
        extraction.generate(prompts_of(30, 40))
    assert extraction.in_worker(lambda worker: len(worker.model_runner.requests)) == [0, 0]


def test_an_error_on_all_ranks_leaves_the_generator_usable(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        def broken_layer(*args: Any, **kwargs: Any) -> None:
            raise ValueError("planted in layer 1")

        worker.model_runner.get_model().model.layers[1].forward = broken_layer

    def mend(worker: Any) -> None:
        del worker.model_runner.get_model().model.layers[1].forward

    extraction.in_worker(plant)
    with pytest.raises(RuntimeError, match="ValueError: planted in layer 1"):
        extraction.generate(prompts_of(20, 30))
    extraction.in_worker(mend)
    extraction.check(prompts_of(20, 30, 25))
