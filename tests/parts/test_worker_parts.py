"""Parts of the worker extension on their own: taps, labels, host memory, reply shape."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_compat.patches.hand_over import rows_in
from vllm_compat.patches.reply_shape import list_of_one_reply
from vllm_compat.patches.worker.labels import Label, check_runner, step_labels
from vllm_compat.patches.worker.meaning import Meaning
from vllm_compat.patches.worker.rows import HostMemory, HostRows
from vllm_compat.patches.worker.taps import decoder_layers, residual_stream, tap


def test_residual_stream_is_the_sum_of_a_pair_and_owns_its_memory() -> None:
    hidden, residual = torch.ones(3, 2), torch.full((3, 2), 2.0)
    stream = residual_stream("Layer", (hidden, residual))
    hidden.zero_()
    residual.zero_()
    assert stream.tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("pair", [False, True])
def test_residual_stream_without_residual_is_a_copy(pair: bool) -> None:
    hidden = torch.ones(3, 2)
    stream = residual_stream("Layer", (hidden, None) if pair else hidden)
    hidden.zero_()
    assert stream.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    "output", [(torch.ones(3, 2), torch.ones(3, 1)), (torch.ones(3, 2),) * 3, [torch.ones(3, 2)], None, (None, None)]
)
def test_an_output_of_unknown_form_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=r"decoder layer MyLayer returned .*; expected a tensor, or a pair"):
        residual_stream("MyLayer", output)


class Stack(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))


def test_decoder_layers_are_found_in_plain_and_wrapped_models() -> None:
    plain = SimpleNamespace(model=Stack(4))
    assert decoder_layers(plain, 4) is plain.model.layers
    wrapped = SimpleNamespace(visual=Stack(4), get_language_model=lambda: plain)
    assert decoder_layers(wrapped, 4) is plain.model.layers


def test_a_model_without_decoder_layers_is_refused_by_name() -> None:
    class Strange:
        model = Stack(3)

    with pytest.raises(
        ValueError, match=r"model class Strange .* no list of 4 decoder layers .* model.layers \(has 3\)"
    ):
        decoder_layers(Strange(), 4)


def test_taps_do_not_change_the_forward_and_can_be_removed() -> None:
    stack, seen = Stack(3), []
    handles = tap(stack.layers, [0, 2], lambda *told: seen.append(told))
    value = torch.ones(2, 2)
    assert stack.layers[2](value) is value
    for handle in handles:
        handle.remove()
    stack.layers[2](value)
    assert [(layer, name) for layer, name, _ in seen] == [(2, "Identity")]
    assert seen[0][2] is value


class Model(torch.nn.Module):
    """Layers, and a final norm that is given what `take` picks of the last one's output."""

    def __init__(self, *layers: torch.nn.Module, take: Any = lambda output: output, norm: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.norm = norm
        self.take = take

    def forward(self, states: torch.Tensor) -> None:
        output: Any = states
        for layer in self.layers:
            output = layer(*output) if isinstance(output, tuple) else layer(output)
        taken = self.take(output)
        self.norm(*taken) if isinstance(taken, tuple) else self.norm(taken)


class Pair(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden + 1, hidden * 2


class Single(torch.nn.Module):
    def forward(self, *states: torch.Tensor) -> torch.Tensor:
        return states[0] + 1


class Stacked(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([hidden, hidden])


class AnyNorm(torch.nn.Module):
    def forward(self, *states: torch.Tensor) -> torch.Tensor:
        return states[0]


def learnt(model: Model) -> Meaning:
    meaning = Meaning(model, model.layers, torch.bfloat16)
    meaning.refuse_if_known()  # nothing has run yet
    model(torch.arange(6.0).view(3, 2))
    return meaning


def test_single_tensors_that_the_final_norm_takes_are_the_stream() -> None:
    meaning = learnt(Model(Single(), Single(), norm=AnyNorm()))
    meaning.check()
    assert meaning.sample == [2.0, 3.0]


@pytest.mark.parametrize("first", [torch.full((3, 2), float("nan")), torch.full((3, 2), -1.0), torch.ones(0, 2)])
def test_a_first_pass_that_says_nothing_leaves_the_sample_to_a_later_one(first: torch.Tensor) -> None:
    model = Model(Single(), norm=AnyNorm())
    meaning = Meaning(model, model.layers, torch.bfloat16)
    model(first)
    meaning.check()
    assert meaning.sample == []
    for start in (4.0, 9.0):
        model(torch.arange(start, start + 6).view(3, 2))
        assert meaning.sample == [5.0, 6.0]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Model(Pair(), Pair(), take=lambda pair: pair[0], norm=AnyNorm()), "takes 1 of the 2 tensors"),
        (Model(Pair(), Pair(), norm=AnyNorm()), "is a AnyNorm, not an RMSNorm"),
        (Model(Pair(), Single(), norm=AnyNorm()), "some of its decoder layers return 1 tensors, others 2"),
        (Model(Single(), take=lambda states: states * 2, norm=AnyNorm()), "no final norm was seen"),
        (Model(Stacked(), norm=AnyNorm()), r"return tensors of shape \[2, 3, 2\]"),
    ],
)
def test_what_the_final_norm_does_not_confirm_is_refused_after_one_pass(model: Model, why: str) -> None:
    meaning = learnt(model)
    with pytest.raises(ValueError, match=f"model class Model is not supported: .*{why}"):
        meaning.refuse_if_known()


def test_a_model_that_has_not_run_is_refused_at_the_end_of_a_call_only() -> None:
    model = Model(Single(), norm=AnyNorm())
    meaning = Meaning(model, model.layers, torch.bfloat16)
    meaning.refuse_if_known()
    with pytest.raises(ValueError, match="no final norm was seen"):
        meaning.check()


def batch(ids: list[str], computed: list[int]) -> SimpleNamespace:
    # The batch keeps room for more requests than it holds.
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[*ids, "left over"], num_reqs=len(ids), num_computed_tokens_cpu=[*computed, 99]
        )
    )


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in (new | cached).items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=at) for n, (at, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[at for at, _ in cached.values()]
        ),
    )


def test_labels_follow_the_runners_batch_not_the_scheduler() -> None:
    step = scheduled(new={"b0": (0, 5), "b1": (0, 7)}, cached={"a3": (192, 8)})
    assert step_labels(batch(["b0", "b1", "a3"], [0, 0, 192]), step) == [
        Label("b0", 0, 5),
        Label("b1", 0, 7),
        Label("a3", 192, 8),
    ]


def test_labels_refuse_a_batch_that_differs_from_the_step() -> None:
    step = scheduled(new={"a": (0, 5)}, cached={})
    with pytest.raises(RuntimeError, match="the batch holds"):
        step_labels(batch(["a", "b"], [0, 0]), step)
    with pytest.raises(RuntimeError, match="request a: the model runner is at token 3"):
        step_labels(batch(["a"], [3]), step)


def test_a_model_runner_without_a_batch_of_known_form_is_refused() -> None:
    check_runner(batch([], []))
    for runner in (SimpleNamespace(), SimpleNamespace(input_batch=None), SimpleNamespace(input_batch=object())):
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            check_runner(runner)


def test_host_memory_has_no_name_and_is_private() -> None:
    memory = HostMemory(1 << 16)
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_mode & 0o777 == 0o600
    assert os.fstat(memory.fd).st_nlink == 0
    memory.close()


def test_host_memory_without_memfd_still_holds_rows_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> int:
        raise PermissionError("memfd_create refused")

    monkeypatch.setattr(os, "memfd_create", refused)
    host = HostRows()
    host.resize(1, 4, torch.ones(1, 8)).fill_(2.0)
    description = host.description()
    assert description["fd"] is None
    assert "memfd_create refused" in description["why_not_shared"]
    assert host.rows is not None
    assert host.rows.sum() == 64


def test_no_room_is_an_error_text_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = HostMemory(1 << 16)
    assert memory.fd is None
    assert "No space left" in str(memory.why_not_shared)


def test_a_refusal_to_lock_pages_is_said_once_and_fails_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's runtime keeps the error of a refusal, and torch raises it after the next launch (C10_CUDA_CHECK)."""
    last_error = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            last_error.append("the refusal")
            return 2

    def launch(*size: int, device: str) -> None:
        if last_error:
            raise RuntimeError(f"CUDA error: {last_error.pop()}")

    host = HostRows()
    host.resize(2, 8, torch.ones(1, 4))
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", launch)
    for warnings in (1, 0):
        host._lock_pages(torch.device("cuda"))
        assert not host.is_pinned
        launch(1, device="cuda")
        said = host.take_warnings()
        assert len(said) == warnings
        assert all("cudaHostRegister: error 2" in each for each in said)


def test_host_rows_grow_and_are_used_again() -> None:
    host = HostRows()
    host.resize(2, 8, torch.ones(1, 4, dtype=torch.bfloat16))
    first = host.description()
    host.resize(2, 4, torch.ones(1, 4, dtype=torch.bfloat16))
    assert host.description()["fd"] == first["fd"]
    assert host.description()["shape"] == (2, 4, 4)
    host.resize(2, 64, torch.ones(1, 4, dtype=torch.bfloat16))
    assert host.description()["bytes"] > first["bytes"]
    host.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first["fd"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_parent_reads_the_very_bytes(dtype: torch.dtype) -> None:
    host = HostRows()
    want = torch.randn(2, 5, 3).to(dtype)
    host.resize(2, 5, want).copy_(want)
    assert host.memory is not None
    description = host.description()
    got = rows_in(host.memory.memory, description["shape"], description["dtype"])
    assert torch.equal(torch.stack(got), want)


def test_reply_shape_accepts_a_bare_list_and_a_list_of_one_list() -> None:
    layers = [torch.ones(3, 2), torch.zeros(3, 2)]
    assert list_of_one_reply(layers) == [layers]
    assert list_of_one_reply([layers]) == [layers]
    single = [torch.ones(3, 2)]
    assert list_of_one_reply(single)[0] is single
    assert list_of_one_reply(None) == [None]
    assert list_of_one_reply([None]) == [None]


FORK = """
import os, torch
torch.set_num_threads(4)
big = torch.ones(4_000_000)
big.exp()  # so OpenMP's threads are there
from vllm_compat.patches.workers import _safe_to_fork
with _safe_to_fork() as threads:
    child = os.fork()
    if child == 0:
        big.exp()  # waits for ever for threads that a fork does not take along
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
assert threads == 4
"""


def test_a_forked_worker_can_compute_after_its_parent_has(tmp_path: Path) -> None:
    """As with a second generator, or in a job whose scheduler sets OMP_NUM_THREADS (Slurm, torchrun)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    environment.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    subprocess.run([sys.executable, "-c", FORK], cwd=tmp_path, env=environment, timeout=60, check=True)


class Rotary(torch.nn.Module):
    """Like vLLM's, with a kernel that is wrong for queries of three dimensions, or is not."""

    rotary_dim = 4

    def __init__(self, good: bool) -> None:
        super().__init__()
        self.cos_sin_cache = torch.empty(0)
        self.good = good

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return query + positions.view(-1, *[1] * (query.dim() - 1)), key

    def forward(self, positions: Any, query: Any, key: Any = None) -> Any:
        return self.forward_native(positions + (not self.good and query.dim() > 2), query, key)


class Turned(torch.nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        heads = torch.zeros(len(states), 2, 4)  # as in a warm-up
        self.rotary(torch.zeros(len(states), dtype=torch.long), heads, key=heads)
        return states


@pytest.mark.parametrize("good", [True, False])
def test_a_rotary_kernel_that_is_wrong_is_seen_in_a_warm_up_of_zeros(good: bool) -> None:
    model = Model(Turned(Rotary(good)), norm=AnyNorm())
    meaning = Meaning(model, model.layers, torch.bfloat16)
    model(torch.zeros(3, 4))
    if good:
        meaning.check()
    else:
        with pytest.raises(ValueError, match="vLLM's rotary kernel on this device does not turn"):
            meaning.check()
