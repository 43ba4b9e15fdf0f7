"""Seam "capture": our worker extension instead of a copy of Llama's forward, told which rows to expect."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

from vllm_compat.errors import CompatError
from vllm_compat.patches._generator import STATE, current_generator
from vllm_compat.patches._names import (
    ANNOUNCE,
    CONSUMER,
    CONSUMER_EXTENSION,
    FETCH,
    GENERATOR,
    OUR_EXTENSION,
    RESET,
    RETIRES,
)
from vllm_compat.patches.worker.labels import V2_BATCH
from vllm_compat.registry import Patch, Rebind, Shape

NONFINITE = "VLLM_COMPAT_NONFINITE"
_V2 = "vllm.v1.worker.gpu.model_runner"
_HAS_V1, _KNOWN_V2 = "<0.34", ">=0.18"  # vLLM's two model runners: patches/worker/labels.py
_call_numbers = itertools.count(1)


def parallel_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def make(**kwargs: Any) -> Any:
        if kwargs.get("worker_extension_cls") == CONSUMER_EXTENSION:
            kwargs["worker_extension_cls"] = OUR_EXTENSION
        return original(**kwargs)

    return make


def capturing_executor(original: type) -> type:
    class CapturingExecutor(original):  # type: ignore[valid-type, misc]
        understands_descriptions = False
        _streams_checked = False

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            if method == ANNOUNCE:  # the workers' labels come from their own batch
                return [None] * self.world_size
            if method == RESET:  # all requests of the call have been added, none is scheduled
                kwargs["args"] = (self._call_description(),)
            if method == FETCH and not self._streams_checked:
                self._check_streams()
            return super().collective_rpc(method, *args, **kwargs)

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            super().initialize_from_config(kv_cache_configs)
            if hasattr(self, "compile_or_warm_up_model"):  # no longer part of it from vLLM 0.27 on
                self.compile_or_warm_up_model()
            self._check_streams()  # vLLM's warm-up has run the model once

        def _check_streams(self) -> None:
            samples = self.collective_rpc("_vllm_compat_check_model")
            check_whole_streams(samples)
            self._streams_checked = all(samples)

        def _call_description(self) -> dict[str, Any]:
            """What the workers need to know of a call: each request's rows, in the order of submission."""
            self.call_number = next(_call_numbers)
            generator = current_generator()
            requests = generator.scheduler.requests.values()
            self.call_requests = [(request.request_id, request.num_prompt_tokens) for request in requests]
            lengths = [count for _, count in self.call_requests]
            expected = getattr(generator, STATE).lengths
            if lengths != expected:  # the consumer's slices would not be ours
                raise RuntimeError(
                    f"vllm_compat: prompts of {expected} tokens were given, the scheduler holds prompts of {lengths}"
                )
            return {
                "call": self.call_number,
                "requests": self.call_requests,
                "describe": self.understands_descriptions,
                "nonfinite": nonfinite_policy(),
            }

    return CapturingExecutor


def check_whole_streams(samples: list[list[float]]) -> None:
    """Every rank of a tensor-parallel group must hold the whole residual stream, as rank 0 does whose rows are kept.

    Args:
        samples: values of one row, as each rank has it; empty from a rank that has none yet.

    Raises:
        CompatError: they differ: the ranks hold parts of a sum (``reduce_results=False``), or other rows.
    """
    for rank, sample in enumerate(samples[1:], start=1):
        # All ranks get one sum from one all-reduce, so they differ by its order of addition at most; parts of a sum
        # differ by their whole length. What is not finite says nothing.
        pairs = [pair for pair in zip(samples[0], sample, strict=False) if all(map(math.isfinite, pair))]
        if math.hypot(*(a - b for a, b in pairs)) > 0.05 * math.hypot(*(a for a, _ in pairs)):
            raise CompatError(
                f"vllm_compat: tensor-parallel rank {rank} holds another residual stream than rank 0 after the last "
                "decoder layer: each has a part of it, and rows of one rank would be wrong. Use tensor_parallel_size=1."
            )


def nonfinite_policy() -> str:
    policy = os.environ.get(NONFINITE, "error")
    if policy not in ("error", "warn"):
        raise CompatError(f"{NONFINITE}={policy}: expected 'error' (the default) or 'warn'")
    return policy


PATCH = Patch(
    id="capture",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    needs=("call-boundary",),
    targets=(
        Rebind(module=GENERATOR, name="ParallelConfig", make=parallel_config),
        Rebind(module=GENERATOR, name="MultiprocExecutor", make=capturing_executor),
    ),
    shapes=(
        Shape(module="vllm.config.parallel", symbol="ParallelConfig", fields=("worker_extension_cls",)),
        Shape(module="vllm.v1.worker.gpu_model_runner", symbol="GPUModelRunner.execute_model", releases=_HAS_V1),
        Shape(module="vllm.v1.worker.gpu_model_runner", symbol="GPUModelRunner.get_model", releases=_HAS_V1),
        Shape(module="vllm.v1.worker.gpu_input_batch", symbol="InputBatch.req_ids", releases=_HAS_V1),
        Shape(module=_V2, symbol="GPUModelRunner.execute_model", releases=_KNOWN_V2),
        Shape(module=_V2, symbol="GPUModelRunner.get_model", releases=_KNOWN_V2),
        Shape(
            module=_V2,
            symbol="GPUModelRunner.prepare_inputs",
            parameters=("scheduler_output",),
            releases=_KNOWN_V2,
        ),
        Shape(module=_V2, symbol="ExecuteModelState", fields=("input_batch",), releases=_KNOWN_V2),
        Shape(module="vllm.v1.worker.gpu.input_batch", symbol="InputBatch", fields=V2_BATCH, releases=_KNOWN_V2),
        Shape(module="vllm.distributed.parallel_state", symbol="get_tp_group"),
    ),
    symptom=(
        "Worker failed with error ''LlamaModel' object has no attribute 'get_input_embeddings''; without an error: "
        "rows of prompts exchanged, steps of the model's own forward left out"
    ),
    cause=(
        "speculators 0.3.0 replaces the model's forward by a copy of Llama's of vLLM 0.11.0 and takes the order of "
        "rows for the order of prompts"
    ),
    does=(
        "Names our worker extension, which taps the decoder layers of the model's own forward, labels each row by "
        "request and position from the model runner's own batch, and checks counts, coverage and values."
    ),
    retires=RETIRES,
    evidence="capture",
)
