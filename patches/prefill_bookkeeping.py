"""Seam "prefill bookkeeping", inner half: a request ends when its whole prompt is computed; workers hear of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_compat.patches._generator import current_generator
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def whole_prompt_scheduler(original: type) -> type:
    class WholePromptScheduler(original):  # type: ignore[valid-type, misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """The next step; an empty one is final, reaches the workers, and leaves no prompt behind.

            Raises:
                RuntimeError: a prompt cannot be scheduled (the consumer's loop would end without its rows).
            """
            from vllm.v1.request import RequestStatus

            # The consumer of 0.3 finishes each request after its step; that of 0.4 after the last one, when their slots
            # are long wanted by others.
            self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
            step = super().schedule(*args, **kwargs)
            # Also where the step only took blocks back: a request gives up its own only when no other is left to give.
            if not step.total_num_scheduled_tokens:
                if self.requests:
                    raise RuntimeError(self._why_stuck())
                if step.finished_req_ids:
                    current_generator().executor.execute_model(step)
            return step

        def finish_requests(self, request_ids: str | Iterable[str], finished_status: Any) -> Any:
            """The consumer finishes each request after its first step; one with tokens to go stays."""
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            whole = [i for i in ids if i not in self.requests or self._is_whole(self.requests[i])]
            return super().finish_requests(whole, finished_status)

        @staticmethod
        def _is_whole(request: Any) -> bool:
            return bool(request.num_computed_tokens >= request.num_prompt_tokens)

        def _why_stuck(self) -> str:
            request = next(iter(self.requests.values()))
            pool = self.kv_cache_manager.block_pool
            return (
                f"vllm_compat: {len(self.requests)} prompts cannot be scheduled; the first is "
                f"request {request.request_id} with {request.num_prompt_tokens} tokens, "
                f"{request.num_computed_tokens} computed. Free KV-cache blocks: {pool.get_num_free_blocks()} "
                f"of {pool.num_gpu_blocks}, block size {self.block_size}. Give the generator "
                "more memory (gpu_memory_utilization) or a smaller max_model_len."
            )

    return WholePromptScheduler


PATCH = Patch(
    id="prefill-bookkeeping",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    after=("scheduler-construction", "scheduler-block-sizes"),
    needs=("call-boundary",),
    targets=(Rebind(module=GENERATOR, name="Scheduler", make=whole_prompt_scheduler),),
    shapes=(
        Shape(module="vllm.v1.core.sched.scheduler", symbol="Scheduler.schedule"),
        Shape(
            module="vllm.v1.core.sched.output",
            symbol="SchedulerOutput",
            fields=("total_num_scheduled_tokens", "finished_req_ids", "num_scheduled_tokens"),
        ),
    ),
    symptom=(
        "No error: a prompt longer than what is left of a step is cut, later rows shift; with Model Runner V2 "
        "'No free indices' after max_num_seqs prompts"
    ),
    cause=(
        "speculators 0.3.0 aborts every request after its first step and drops the empty last step that carries the "
        "finished ids; 0.4 keeps every request until the last step, so only max_num_seqs prompts are ever scheduled; "
        "vLLM 0.11.1 turned chunked prefill on"
    ),
    does=(
        "Finishes a request when its whole prompt has been computed, delivers the empty step to the workers, and "
        "raises when a prompt cannot be scheduled."
    ),
    retires=RETIRES,
    evidence="prefill-bookkeeping",
)
