"""Two ranks: rank 0 hands over, every rank is proven, and the first error is not lost between them."""

from __future__ import annotations

import time
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
    assert extraction.requests_in_workers() == [0, 0]


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
    assert extraction.generator.executor.first_error() is None  # what was mended does not explain a later failure


def test_an_error_of_one_rank_while_sampling_is_not_lost(extraction: Any, prompts_of: Prompts) -> None:
    """Nothing collective follows the sampler, so the rank that replies does not notice."""

    def plant(worker: Any) -> None:
        def broken_sampler(*args: Any, **kwargs: Any) -> None:
            raise ValueError("planted in the sampler of rank 1")

        if worker.rank == 1:
            worker.model_runner._sample = broken_sampler

    def mend(worker: Any) -> None:
        worker.model_runner.__dict__.pop("_sample", None)

    extraction.in_worker(plant)
    with pytest.raises(RuntimeError, match="a worker failed: ValueError: planted in the sampler of rank 1"):
        extraction.generate(prompts_of(*[511] * 20, 30))
    extraction.in_worker(mend)
    extraction.check(prompts_of(20, 30, 25))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_failing_alone_is_the_first_error_and_never_mixes_calls(
    model: Path, extract: Callable[..., Any], prompts_of: Prompts, rank: int
) -> None:
    """Its peers wait in an all-reduce that the next call's would meet, so the generator must not go on."""
    extraction = extract(model, [0, 3, 5], max_model_len=512, tensor_parallel_size=2)

    def plant(worker: Any, rank: int) -> None:
        def broken_layer(*args: Any, **kwargs: Any) -> None:
            raise ValueError(f"planted on rank {rank} alone")

        if worker.rank == rank:
            worker.model_runner.get_model().model.layers[1].forward = broken_layer

    extraction.in_worker(plant, rank)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"ValueError: planted on rank {rank} alone") as error:
        extraction.generate(prompts_of(20, 30))
    assert f"traceback of worker rank {rank}" in str(error.value)
    assert time.monotonic() - begin < 60  # vLLM's own limit is five minutes, and its error names no cause
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        extraction.generate(prompts_of(20, 30))
