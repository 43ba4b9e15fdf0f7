"""Errors in the middle of a call: the first one wins, and nothing of it leaks into the next call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.patches._generator import STATE, generator_in_use

Prompts = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def built(model: Path, extract: Callable[..., Any]) -> Any:
    return extract(model, [0, 3, 5], max_model_len=512)


@pytest.fixture
def extraction(built: Any) -> Iterator[Any]:
    yield built

    def restore(worker: Any) -> None:
        for layer in worker.model_runner.get_model().model.layers:
            layer.__dict__.pop("forward", None)

    built.in_worker(restore)


def test_case_5_the_first_error_wins_and_carries_the_workers_traceback(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        def broken_layer(*args: Any, **kwargs: Any) -> None:
            raise ValueError("planted in layer 2")

        worker.model_runner.get_model().model.layers[2].forward = broken_layer

    extraction.in_worker(plant)
    with pytest.raises(RuntimeError, match="ValueError: planted in layer 2") as error:
        extraction.generate(prompts_of(20, 30))
    assert "traceback of worker rank 0" in str(error.value)
    assert "in broken_layer" in str(error.value)

    def mend(worker: Any) -> None:
        del worker.model_runner.get_model().model.layers[2].forward

    extraction.in_worker(mend)
    assert not extraction.generator.scheduler.requests
    extraction.check(prompts_of(33, 20, 30))
    assert extraction.requests_in_workers() == [0]


def test_an_error_while_sampling_carries_the_workers_traceback_too(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        def broken_sampler(*args: Any, **kwargs: Any) -> None:
            raise ValueError("planted in the sampler")

        worker.model_runner._sample = broken_sampler

    def mend(worker: Any) -> None:
        del worker.model_runner._sample

    extraction.in_worker(plant)
    with pytest.raises(RuntimeError, match="ValueError: planted in the sampler") as error:
        extraction.generate(prompts_of(20, 30))
    assert "in broken_sampler" in str(error.value)
    extraction.in_worker(mend)
    extraction.check(prompts_of(33, 20))


def test_an_error_in_a_later_step_leaves_nothing_either(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        layer, steps = worker.model_runner.get_model().model.layers[1], []
        run = type(layer).forward.__get__(layer)

        def fails_in_step_2(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            if len(steps) == 2:
                raise ValueError("planted in step 2")
            return run(*args, **kwargs)

        layer.forward = fails_in_step_2

    extraction.in_worker(plant)
    with pytest.raises(RuntimeError, match="planted in step 2"):
        extraction.generate(prompts_of(*[500] * 40))
    assert not extraction.generator.scheduler.requests
    extraction.check(prompts_of(*[500] * 20))


def test_a_nan_row_is_named_by_prompt_position_and_layer(
    extraction: Any, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plant(worker: Any) -> None:
        layer = worker.model_runner.get_model().model.layers[5]
        run = type(layer).forward.__get__(layer)

        def one_row_not_a_number(*args: Any, **kwargs: Any) -> Any:
            hidden, residual = run(*args, **kwargs)
            hidden[20 + 12] = float("nan")
            return hidden, residual

        layer.forward = one_row_not_a_number

    extraction.in_worker(plant)
    prompts = prompts_of(20, 30, 25)
    with pytest.raises(
        RuntimeError, match=r"prompt 1 \(request \w+\), position 12, layer 5: hidden state is not finite"
    ):
        extraction.generate(prompts)
    monkeypatch.setenv("VLLM_COMPAT_NONFINITE", "warn")
    with caplog.at_level("WARNING", "vllm_compat"):
        results = extraction.generate(prompts)
    assert "position 12, layer 5: hidden state is not finite (1 such rows)" in caplog.text
    finite = [[bool(row.isfinite().all()) for row in result["hidden_states"][2]] for result in results]
    assert finite == [[True] * 20, [position != 12 for position in range(30)], [True] * 25]


def test_a_layer_of_one_single_value_is_an_error(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        layer = worker.model_runner.get_model().model.layers[5]
        run = type(layer).forward.__get__(layer)

        def zeros(*args: Any, **kwargs: Any) -> Any:
            return tuple(part * 0 for part in run(*args, **kwargs))

        layer.forward = zeros

    extraction.in_worker(plant)
    with pytest.raises(
        RuntimeError, match=r"prompt 0 .*, layer 5: each of its 20 rows holds one single value; prompt 1 "
    ):
        extraction.generate(prompts_of(20, 30))


def test_a_layer_output_of_unknown_form_is_an_error(extraction: Any, prompts_of: Prompts) -> None:
    def plant(worker: Any) -> None:
        # Our tap stands between these two: it sees three values, the model's own forward its two.
        layer = worker.model_runner.get_model().model.layers[3]
        before = layer.register_forward_hook(lambda module, args, output: (*output, None), prepend=True)
        after = layer.register_forward_hook(lambda module, args, output: output[:2])
        worker.planted_hooks = [before, after]

    extraction.in_worker(plant)
    match = r"decoder layer LlamaDecoderLayer returned .*; expected a tensor, or a pair"
    with pytest.raises(RuntimeError, match=match):
        extraction.generate(prompts_of(20, 30))
    extraction.in_worker(lambda worker: [handle.remove() for handle in worker.planted_hooks] and None)
    extraction.check(prompts_of(20, 30))


def test_a_prompt_that_cannot_be_scheduled_is_an_error_not_the_end(extraction: Any, prompts_of: Prompts) -> None:
    scheduler = extraction.generator.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    block = scheduler.block_size  # 16, or what the release's CPU build likes better
    prompts = prompts_of(block - 2, 3 * block, 5)
    try:
        with pytest.raises(
            RuntimeError, match=rf"2 prompts cannot be scheduled; the first is request .* with {3 * block} tokens"
        ):
            extraction.generate(prompts)
    finally:
        pool.free_blocks(taken)
    assert not scheduler.requests
    extraction.check(prompts)


def test_two_calls_at_once_are_refused(extraction: Any, prompts_of: Prompts) -> None:
    scheduler = extraction.generator.scheduler
    inside, go_on, failures = threading.Event(), threading.Event(), []
    original = scheduler.schedule

    def slow(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return original(*args, **kwargs)

    def first() -> None:
        try:
            extraction.check(prompts_of(20, 30))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    scheduler.schedule = slow
    try:
        thread = threading.Thread(target=first)
        thread.start()
        assert inside.wait(30)
        with pytest.raises(RuntimeError, match="already running on this generator in another thread"):
            extraction.generate(prompts_of(10))
        go_on.set()
        thread.join(60)
    finally:
        del scheduler.schedule
    assert not failures


def test_a_generator_whose_replies_may_be_out_of_step_says_so(model: Path, extract: Any, prompts_of: Prompts) -> None:
    other = extract(model, [0], max_model_len=128)

    def sleep(worker: Any) -> None:
        import time

        time.sleep(1)

    executor = other.generator.executor
    with pytest.raises(TimeoutError):
        executor.collective_rpc(sleep, timeout=0.05)  # its reply will come when nobody waits for it
    with pytest.raises(RuntimeError, match="cannot be used any more: replies of its workers may be out of step"):
        other.generate(prompts_of(5))


def test_a_generator_after_another_in_one_process(model: Path, extract: Any, prompts_of: Prompts) -> None:
    extract(model, [1, 2], max_model_len=128).check(prompts_of(60, 5))


def test_settings_that_make_no_sense_are_errors_before_the_model_loads(model: Path, extract: Any) -> None:
    for wrong in ([], [2.0], [True], torch.tensor([1, 3]), "13"):
        with pytest.raises(ValueError, match="layer_ids: expected"):
            extract(model, wrong, max_model_len=128)
    with pytest.raises(ValueError, match="max_model_len: expected at least 2"):
        extract(model, [0], max_model_len=1)


def test_hidden_states_are_plain_cpu_tensors(extraction: Any, prompts_of: Prompts) -> None:
    (result,) = extraction.generate(prompts_of(9))
    assert {states.device for states in result["hidden_states"]} == {torch.device("cpu")}


def test_a_worker_with_other_files_is_refused_before_the_model_loads(
    model: Path, extract: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vllm_compat import CompatError
    from vllm_compat.patches import workers

    monkeypatch.setattr(workers, "fingerprint", lambda: "0123456789abcdef")
    with pytest.raises(CompatError, match=r"would run files \w+ from .*, its parent has 0123456789abcdef"):
        extract(model, [0], max_model_len=128)
    assert "Starting to load model" not in "".join(capfd.readouterr())


def test_what_an_unseen_call_left_is_not_handed_over(extraction: Any, prompts_of: Prompts) -> None:
    from speculators.data_generation import vllm_hidden_states_generator as module

    left = module.SamplingParams(max_tokens=1)
    with generator_in_use(extraction.generator):
        for number in range(2):
            request = module.Request(
                request_id=f"left_{number}",
                prompt_token_ids=[7] * 30,
                sampling_params=left,
                pooling_params=None,
                eos_token_id=None,
            )
            extraction.generator.scheduler.add_request(request)
    extraction.check(prompts_of(30, 20))


def test_an_interrupt_while_cleaning_up_leaves_the_generator_unusable(
    model: Path, extract: Any, prompts_of: Prompts
) -> None:
    other = extract(model, [0], max_model_len=128)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    other.generator.scheduler.abort_all = interrupted
    other.generator.scheduler.schedule = lambda: 1 / 0
    with pytest.raises(KeyboardInterrupt):
        other.generate(prompts_of(5))
    del other.generator.scheduler.abort_all, other.generator.scheduler.schedule
    with pytest.raises(RuntimeError, match="cannot be used any more: its last call was interrupted"):
        other.generate(prompts_of(5))


@pytest.mark.parametrize(
    ("raised", "why"),
    [(KeyboardInterrupt, "its last call was interrupted"), (TimeoutError, r"in the middle of schedule \(TimeoutError")],
)
def test_what_a_signal_raises_within_vllms_scheduler_leaves_the_generator_unusable(
    model: Path, extract: Any, prompts_of: Prompts, raised: type[BaseException], why: str
) -> None:
    """Its accounts of requests and blocks may be half written, and nothing in them says so."""
    other = extract(model, [0], max_model_len=128)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise raised

    pool = other.generator.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks = interrupted
    with pytest.raises(raised):
        other.generate(prompts_of(5))
    del pool.get_new_blocks
    with pytest.raises(RuntimeError, match=f"cannot be used any more: .*{why}"):
        other.generate(prompts_of(5))


def test_after_a_shutdown_it_says_so(model: Path, extract: Any, prompts_of: Prompts) -> None:
    other = extract(model, [0], max_model_len=128)
    other.generator.executor.shutdown()
    with pytest.raises(RuntimeError, match=r"any more: it has been shut down\. Build a new one"):
        other.generate(prompts_of(5))


def test_the_callers_list_of_layers_may_change(model: Path, extract: Any) -> None:
    layer_ids = [0, 3]
    other = extract(model, layer_ids, max_model_len=128)
    layer_ids[:] = [1, 2]
    assert list(other.generator.layer_ids) == [0, 3]


def test_a_forked_child_is_refused(extraction: Any, prompts_of: Prompts) -> None:
    state = getattr(extraction.generator, STATE)
    state.pid += 1
    with pytest.raises(RuntimeError, match="this generator belongs to process"):
        extraction.generate(prompts_of(5))
    state.pid -= 1


def test_a_killed_worker_is_named(model: Path, extract: Any, prompts_of: Prompts) -> None:
    other = extract(model, [0], max_model_len=128)
    os.kill(other.generator.executor.workers[0].proc.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"a worker process has ended|its workers are gone"):
        other.generate(prompts_of(5))
    with pytest.raises(RuntimeError, match="its workers are gone"):
        other.generate(prompts_of(5))
