"""What only a GPU shows: real attention kernels, page-locked hand-over, device memory, and a parent without CUDA.

Run it with ``pytest tests/gpu tests/live/test_rows.py --tp N``: N-way tensor parallelism on N CUDA devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Prompts = Callable[..., list[list[int]]]
LAYER_IDS = [2, 8, 13, 15]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, active: None) -> Path:
    """16 layers, hidden size 2048, bfloat16: enough for several attention tiles and for copies that take a while."""
    from vllm_compat.extraction.tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("models") / "large"
    make_model(folder, layers=16, hidden=2048, heads=16, kv_heads=8, max_len=4096, dtype="bfloat16")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def extraction(large: Path, extract: Callable[..., Any]) -> Any:
    return extract(large, LAYER_IDS, max_model_len=2049)


def test_rows_are_right_over_several_steps_and_calls(extraction: Any, prompts_of: Prompts) -> None:
    extraction.check(prompts_of(1000, 3, 517, 1, 64, 2))
    shared, a, b = prompts_of(256, 30, 41)
    for _ in range(2):
        extraction.check([shared + a, shared + b])


def test_batch_equals_one_by_one(extraction: Any, prompts_of: Prompts) -> None:
    import torch

    prompts = prompts_of(*[2048] * 8, 5, 700, 1300)
    for prompt, result in zip(prompts, extraction.generate(prompts), strict=True):
        (alone,) = extraction.generate([prompt])
        for one, many in zip(alone["hidden_states"], result["hidden_states"], strict=True):
            # Another batch shape takes other tiles: sums round differently, a few bfloat16 steps of the row's length.
            error = (one.float() - many.float()).norm(dim=1) / one.float().norm(dim=1)
            assert error.max() < 8 * 2**-8
            assert torch.equal(one.isfinite(), many.isfinite())


def test_the_rows_travel_through_page_locked_shared_memory(extraction: Any, prompts_of: Prompts) -> None:
    extraction.generate(prompts_of(10))
    assert extraction.in_worker(lambda worker: worker._vllm_compat_capture._host.is_pinned)[0] is True
    assert extraction.generator.executor._can_map


def test_a_refusal_to_lock_pages_is_only_slower(
    extraction: Any, prompts_of: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime refuses pages that are locked already, and keeps that as its last error: no kernel may fail by it."""
    import torch

    def refuse(worker: Any) -> None:
        import torch

        host = worker._vllm_compat_capture._host
        host.release()
        lock_pages = host._lock_pages

        def locked_before(device: Any) -> None:
            host.locked_before = torch.frombuffer(host.memory.memory, dtype=torch.uint8).data_ptr()
            assert int(torch.cuda.cudart().cudaHostRegister(host.locked_before, host.memory.size, 0)) == 0
            lock_pages(device)

        host._lock_pages = locked_before

    def mend(worker: Any) -> None:
        import torch

        host = worker._vllm_compat_capture._host
        del host._lock_pages
        if hasattr(host, "locked_before"):  # the rank that keeps the rows
            assert int(torch.cuda.cudart().cudaHostUnregister(host.locked_before)) == 0
            del host.locked_before
            host.release()

    def keeps_locked_rows(worker: Any) -> bool:
        return bool(worker._vllm_compat_capture._host.is_pinned)

    prompts = prompts_of(1000, 3, 517)
    locked = extraction.generate(prompts)
    extraction.in_worker(refuse)
    with caplog.at_level("WARNING", "vllm_compat"):
        pageable = [extraction.generate(prompts) for _ in range(2)]
    assert not any(extraction.in_worker(keeps_locked_rows))
    extraction.in_worker(mend)
    for results in pageable:
        for one, other in zip(locked, results, strict=True):
            assert all(map(torch.equal, one["hidden_states"], other["hidden_states"]))
    (warning,) = caplog.messages
    assert "CUDA does not lock" in warning
    extraction.check(prompts)
    assert extraction.in_worker(keeps_locked_rows)[0]


def test_device_memory_is_flat_over_200_calls_and_bounded_by_a_step(extraction: Any, prompts_of: Prompts) -> None:
    def memory(worker: Any) -> tuple[int, int]:
        import torch

        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return held, peak - held

    prompts = prompts_of(*[1000] * 8)
    extraction.generate(prompts)
    before = extraction.in_worker(memory)
    for _ in range(200):
        extraction.generate(prompts)
    after = extraction.in_worker(memory)
    extraction.generate(prompts_of(*[1000] * 64))  # eight times the rows, in eight steps
    eight_steps = extraction.in_worker(memory)
    step = 8192 * 2048 * 2 * len(LAYER_IDS)  # bytes of one step's captured rows
    for one, many, large in zip(before, after, eight_steps, strict=True):
        assert many[0] <= one[0] + (1 << 20), "device memory grows with the calls"
        assert large[1] <= many[1] + 2 * step, "device memory grows with the size of a call"
    assert not any(extraction.requests_in_workers())


def test_the_parent_holds_nothing_on_a_device(extraction: Any, prompts_of: Prompts) -> None:
    import torch
    from speculators.data_generation.config_generator import DataGenerationConfig

    from vllm_compat.patches.workers import cuda_driver_is_initialised

    extraction.generate(prompts_of(10))
    config = DataGenerationConfig.from_generator(extraction.generator, "chat.jsonl", 2048, "cache", 1)
    assert "NVIDIA" in json.dumps(config.to_dict())
    assert not torch.cuda.is_initialized()
    assert not cuda_driver_is_initialised()


def test_verify_computes_the_reference_on_the_device(large: Path, tp: int, tmp_path: Path) -> None:
    """A child process extracts and ends; then Hugging Face has the device."""
    command = [sys.executable, "-m", "vllm_compat", "verify", str(large), "--device", "cuda", "--json"]
    options = ["--samples", "3", "--seq-length", "512", "--tensor-parallel-size", str(tp)]
    # Elsewhere than in the checkout, which `python -m` would take for the package.
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["device"], len(answer["files"]["recomputed"])) == (True, "cuda", 3)


SCRIPT = """
import torch
if __name__ == "__main__":
    import vllm_compat
    from vllm_compat.patches.workers import cuda_driver_is_initialised
    assert not cuda_driver_is_initialised()
    assert torch.cuda.is_available()
    assert cuda_driver_is_initialised()  # and forked workers could not
    from speculators.data_generation import VllmHiddenStatesGenerator
    generator = VllmHiddenStatesGenerator({model!r}, layer_ids=[0], max_model_len=64, tensor_parallel_size={tp})
    print("rows", generator.generate([[5, 6, 7]])[0]["hidden_states"][0].shape[0])
"""


def test_case_10_workers_start_after_cuda_was_asked_for_devices(model: Path, tp: int, tmp_path: Path) -> None:
    script = tmp_path / "extract.py"
    script.write_text(SCRIPT.format(model=str(model), tp=tp))
    # vLLM sets the second in this process; with it the question would not touch the driver.
    ours = ("VLLM_WORKER_MULTIPROC_METHOD", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert "rows 3" in done.stdout.splitlines(), done.stdout + done.stderr
    assert "workers are spawned, not forked" in done.stderr

    refused = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
        timeout=300,
    )
    assert refused.returncode != 0
    assert "VLLM_WORKER_MULTIPROC_METHOD=fork, but this process has already initialised CUDA" in refused.stderr
