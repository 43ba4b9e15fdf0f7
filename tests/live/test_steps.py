"""Chunked prefill, small step budgets, and prefix caching switched on: the labels must not depend on the settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Prompts = Callable[..., list[list[int]]]
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


@pytest.fixture(scope="module")
def chunked(model: Path, extract: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_COMPAT_STEP_TOKENS", "64")
        return extract(model, [0, 3, 5], max_model_len=1024)


def test_case_2_prompts_are_cut_at_the_budget_and_go_on(chunked: Any, prompts_of: Prompts) -> None:
    config = chunked.generator.vllm_config.scheduler_config
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill) == (64, True)
    prompts = prompts_of(30, 50, 20, 45)
    chunked.check(prompts)
    for prompt in prompts:
        chunked.check([prompt])


def test_case_15_one_prompt_of_eight_steps(chunked: Any, prompts_of: Prompts) -> None:
    chunked.check(prompts_of(8 * 64))
    chunked.check(prompts_of(1000, 7, 512, 1))


def test_case_15_two_hundred_calls_are_flat(chunked: Any, prompts_of: Prompts) -> None:
    def tensors_held(worker: Any) -> int:
        import gc

        import torch

        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    prompts = prompts_of(100, 30, 64)
    chunked.check(prompts)
    before = chunked.in_worker(tensors_held)
    for _ in range(200):
        chunked.generate(prompts)
    assert chunked.in_worker(tensors_held) == before
    assert not any(chunked.requests_in_workers())


def test_random_batches_on_the_real_scheduler(chunked: Any, prompts_of: Prompts) -> None:
    source = random.Random(7)
    for round_ in range(6):
        lengths = [source.choice([1, 2, 15, 16, 17, 63, 64, 65, source.randrange(1, 300)]) for _ in range(40)]
        chunked.check(prompts_of(*lengths[: source.randrange(1, 40)], seed=round_))


def test_case_2_whole_prompts_with_a_small_budget(model: Path, extract: Any, prompts_of: Prompts) -> None:
    import importlib

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(GENERATOR), "MIN_MAX_BATCHED_TOKENS", 64)
        extraction = extract(model, [0, 3, 5], max_model_len=64)
    config = extraction.generator.vllm_config.scheduler_config
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill) == (64, False)
    extraction.check(prompts_of(30, 50, 20, 45))
    extraction.check(prompts_of(63, 1, 63, 64, 2))


def test_prefix_caching_switched_on_still_computes_every_row(model: Path, extract: Any, prompts_of: Prompts) -> None:
    """With the cache on, requests carry the block_hasher and are hashed, and no hit ever skips a token."""
    import importlib

    module = importlib.import_module(GENERATOR)
    ours = module.CacheConfig

    def cache_switched_on(**settings: Any) -> Any:
        config = ours(**settings)
        config.enable_prefix_caching = True
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CacheConfig", cache_switched_on)
        extraction = extract(model, [0, 3, 5], max_model_len=1024)
    cache = extraction.generator.vllm_config.cache_config
    assert cache.enable_prefix_caching
    hashed = []
    add = extraction.generator.scheduler.add_request
    extraction.generator.scheduler.add_request = lambda request: (
        hashed.append(len(request.block_hashes)),
        add(request),
    )
    shared, *ends = prompts_of(4 * cache.block_size, 30, 41, 7)
    prompts = [shared + end for end in ends]
    for _ in range(3):
        extraction.check(prompts)
    assert hashed == [len(prompt) // cache.block_size for prompt in prompts] * 3
    pool = extraction.generator.scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block._cache) > 0, "the cache was never filled: this test shows nothing"


def test_a_step_budget_that_makes_no_sense_is_an_error(model: Path, extract: Any) -> None:
    from vllm_compat import CompatError

    for value in ("8", "many", "-64"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_COMPAT_STEP_TOKENS", value)
            with pytest.raises(CompatError, match=f"VLLM_COMPAT_STEP_TOKENS={value}: expected a whole number"):
                extract(model, [0], max_model_len=64)


def test_rows_leave_while_the_model_runs(chunked: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        model, copies = worker.model_runner.get_model(), worker._vllm_compat_capture._copies
        add, events = copies.add, []
        copies.add = lambda *args: (events.append("copy"), add(*args))
        worker.planted = events, model.register_forward_hook(lambda *args: events.append("end"))

    def harvest(worker: Any) -> list[str]:
        events, handle = worker.planted
        handle.remove()
        del worker._vllm_compat_capture._copies.add, worker.planted
        return events

    chunked.in_worker(plant)
    chunked.check(prompts_of(20, 30))
    (events,) = chunked.in_worker(harvest)
    assert events == [*["copy"] * len(chunked.layer_ids), "end"]
