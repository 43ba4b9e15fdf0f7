"""Seam "two-phase execution": ``execute_model`` that returns None is followed by ``sample_tokens``."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def two_phase_executor(original: type) -> type:
    class TwoPhaseExecutor(original):  # type: ignore[valid-type, misc]
        def execute_model(self, scheduler_output: Any) -> Any:
            """One whole step, as ``EngineCore.step`` runs it.

            None means that the workers hold the step's state until ``sample_tokens``; a real output (an empty step)
            is complete. If the forward fails there is no state to sample from, and its error is the one to see.
            """
            output = super().execute_model(scheduler_output)
            if output is None:
                grammar_output = current_generator().scheduler.get_grammar_bitmask(scheduler_output)
                output = super().sample_tokens(grammar_output)
            return output

        def sample_tokens(self, output: Any) -> Any:
            """The consumer of 0.4 calls this after each step, with that step's output: it has been sampled already."""
            return output

    return TwoPhaseExecutor


PATCH = Patch(
    id="two-phase-execution",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.1"},
    after=("workers", "kv-cache-layout"),
    needs=("call-boundary",),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=two_phase_executor),),
    shapes=(
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.execute_model",
            parameters=("scheduler_output",),
        ),
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.sample_tokens",
            parameters=("grammar_output",),
        ),
        Shape(
            module="vllm.v1.core.sched.scheduler",
            symbol="Scheduler.get_grammar_bitmask",
            parameters=("scheduler_output",),
        ),
    ),
    symptom="State error: sample_tokens() must be called after execute_model() returns None.",
    cause="vLLM 0.11.1 split a step into forward and sampling (vllm#26866, vllm/v1/worker/gpu_model_runner.py)",
    does="Follows every None by exactly one sample_tokens with the grammar output of that step.",
    retires=RETIRES,
    evidence="two-phase-execution",
)
