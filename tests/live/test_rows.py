"""Every row belongs to its prompt, position and layer: the numbered cases, at the consumer's default settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Prompts = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def extraction(model: Path, extract: Callable[..., Any]) -> Any:
    return extract(model, [4, 0, 5, 2], max_model_len=2049)


def test_case_1_repeated_prompts_and_shared_prefixes(extraction: Any, prompts_of: Prompts) -> None:
    (prompt,) = prompts_of(40)
    shared, a, b, c = prompts_of(64, 30, 41, 7)
    extraction.check([prompt])
    extraction.check([prompt])
    for _ in range(2):
        extraction.check([shared + a, shared + b, shared + c])
    extraction.check([prompt, prompt, shared + a])


def test_case_2_more_than_one_step_at_the_default_budget(extraction: Any, prompts_of: Prompts) -> None:
    assert extraction.generator.vllm_config.scheduler_config.max_num_batched_tokens == 8192
    prompts = prompts_of(*[2048] * 8)
    together = extraction.check(prompts)
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = extraction.generate([prompt])
        for layer, (one, many) in enumerate(zip(alone["hidden_states"], result["hidden_states"], strict=True)):
            # The same kernels on other batch shapes: a few bfloat16 roundings, never another row.
            torch.testing.assert_close(one, many, rtol=2**-4, atol=2**-3, msg=f"layer {layer}")


def test_case_2_mixed_lengths_over_several_steps(extraction: Any, prompts_of: Prompts) -> None:
    extraction.check(prompts_of(2000, 2000, 2000, 2000, 1000, 100, 2048, 3, 1, 1500))


def test_case_3_twelve_lengths_and_seventy_prompts(extraction: Any, prompts_of: Prompts) -> None:
    extraction.check(prompts_of(*[7, 90, 33, 5, 61, 1, 48, 19, 75, 12, 2, 40]))
    extraction.check(prompts_of(*[5 + i % 11 for i in range(70)]))


def test_case_4_only_steps_with_a_forward_are_sampled(
    extraction: Any, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, calls = extraction.generator.executor, []
    inherited = executor.collective_rpc

    def listen(method: Any, *args: Any, **kwargs: Any) -> Any:
        reply = inherited(method, *args, **kwargs)
        if method in ("execute_model", "sample_tokens"):
            tokens = kwargs["args"][0].total_num_scheduled_tokens if method == "execute_model" else None
            calls.append((method, tokens, reply is None))
        return reply

    monkeypatch.setattr(executor, "collective_rpc", listen)
    for _ in range(2):
        extraction.check(prompts_of(*[2000] * 5))
    if hasattr(executor, "sample_tokens"):
        one_call = [
            ("execute_model", 8000, True),
            ("sample_tokens", None, False),
            ("execute_model", 2000, True),
            ("sample_tokens", None, False),
            ("execute_model", 0, False),  # carries the finished ids, has a real output, is not sampled
        ]
    else:  # vLLM 0.11.0 has one phase
        one_call = [("execute_model", tokens, False) for tokens in (8000, 2000, 0)]
    assert calls == one_call * 2


def test_case_7_layers_come_in_model_order_whatever_the_order_of_ids(extraction: Any, prompts_of: Prompts) -> None:
    assert extraction.generator.layer_ids == [4, 0, 5, 2]
    (result,) = extraction.check(prompts_of(100))
    assert set(result) == {"input_ids", "hidden_states", "loss_mask"}
    assert result["loss_mask"] is None
    assert result["input_ids"].dtype == torch.long
    assert [(states.shape, states.dtype) for states in result["hidden_states"]] == [((100, 64), torch.bfloat16)] * 4


def test_case_13_lengths_at_the_limits(extraction: Any, prompts_of: Prompts) -> None:
    results = extraction.check(prompts_of(1, 2, 2048, 2049, 3000))
    assert [len(result["input_ids"]) for result in results] == [1, 2, 2048, 2048, 2048]


def test_case_13_an_empty_prompt_is_named(extraction: Any, prompts_of: Prompts) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        extraction.generate([[5], []])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[5, 6], [7, -1]], "prompt 1, position 1: token id -1 is outside"),
        ([[5, 512]], "prompt 0, position 1: token id 512 is outside"),
        ([[5, 6.0]], "prompt 0, position 1: expected an integer"),
        ([[5], [[6]]], "prompt 1, position 0: expected an integer"),
        ([], "cannot be empty"),
    ],
)
def test_case_14_bad_input_is_refused_before_anything_is_scheduled(
    extraction: Any, prompts_of: Prompts, bad: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        extraction.generate(bad)
    assert not extraction.generator.scheduler.requests
    extraction.check(prompts_of(20, 30))


def test_case_14_tensors_work(extraction: Any, prompts_of: Prompts) -> None:
    prompts = prompts_of(25, 25, 25)
    extraction.check(prompts, extraction.generate(torch.tensor(prompts)))
    extraction.check(prompts, extraction.generate([torch.tensor(prompt) for prompt in prompts]))


def test_results_own_their_memory(extraction: Any, prompts_of: Prompts) -> None:
    prompts = prompts_of(30, 40)
    results = extraction.generate(prompts)
    kept = [[states.clone() for states in result["hidden_states"]] for result in results]
    extraction.generate(prompts_of(50, 60, seed=1))
    for result, copies in zip(results, kept, strict=True):
        for states, copy in zip(result["hidden_states"], copies, strict=True):
            assert torch.equal(states, copy)
            assert states.untyped_storage().nbytes() == states.numel() * states.element_size()


def test_the_fallback_through_the_message_queue_gives_the_same_bytes(
    extraction: Any, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(30, 400, 17)
    shared = extraction.generate(prompts)
    executor = extraction.generator.executor

    def refused(*args: Any) -> Any:
        raise PermissionError("no such descriptor")

    monkeypatch.setattr(executor, "_map", refused)
    with caplog.at_level("WARNING", "vllm_compat"):
        pickled = [extraction.generate(prompts) for _ in range(2)]
    monkeypatch.setattr(executor, "_can_map", True)
    for results in pickled:
        for one, other in zip(shared, results, strict=True):
            assert all(map(torch.equal, one["hidden_states"], other["hidden_states"]))
    (warning,) = caplog.messages
    assert "the worker's memory cannot be shared (no such descriptor)" in warning


def test_a_thousand_calls_leave_nothing_behind(extraction: Any, prompts_of: Prompts) -> None:
    def look(worker: Any = None) -> dict[str, int]:
        import os
        from pathlib import Path

        import psutil

        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mapped in /dev/shm": sum("/dev/shm/" in line for line in maps),
            "mapped rows": sum("vllm_compat_rows" in line for line in maps),
            "resident": psutil.Process().memory_info().rss,
        }

    def everybody() -> list[dict[str, int]]:
        return [look(), *extraction.in_worker(look)]

    prompts = prompts_of(30, 5, 12)
    first = extraction.check(prompts)
    for _ in range(50):
        extraction.generate(prompts)
    before = everybody()
    for _ in range(1000):
        last = extraction.generate(prompts)
    after = everybody()
    # Three prompts are 47 rows of 4 layers, 24 KB: a leak of each call's rows would be 24 MB.
    growth = [new.pop("resident") - old.pop("resident") for new, old in zip(after, before, strict=True)]
    assert max(growth) < 12 << 20, growth
    assert after == before
    this_process, first_rank, *other_ranks = (state["mapped rows"] for state in after)
    assert (this_process, first_rank, any(other_ranks)) == (1, 1, False)
    assert not any(extraction.requests_in_workers())
    assert all(
        torch.equal(a, b)
        for x, y in zip(first, last, strict=True)
        for a, b in zip(x["hidden_states"], y["hidden_states"], strict=True)
    )
