"""Seam "prefill bookkeeping", outer half: what holds for one call of ``generate`` as a whole.

Checks the prompts before anything is scheduled, marks which generator is at work, and cleans up after an error so
that nothing of a failed call leaks into the next one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm_compat.patches._generator import STATE, GeneratorState, current_generator, generator_in_use
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.patches._prompts import checked_prompts
from vllm_compat.patches.worker.mailbox import PATIENCE
from vllm_compat.registry import Patch, Rebind, Shape


def guarded_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs)
        layer_ids = given.arguments.get("layer_ids")
        check_settings(layer_ids, given.arguments.get("max_model_len"))
        if layer_ids is not None:
            given.arguments["layer_ids"] = list(layer_ids)  # which the generator keeps: the caller's may change
        with generator_in_use(self):
            try:
                original(*given.args, **given.kwargs)
            except BaseException:
                # The traceback keeps `self` alive, so the consumer's __del__ would not stop the workers.
                if hasattr(self, "executor"):
                    self.executor.shutdown()
                raise
        setattr(self, STATE, GeneratorState())

    return __init__


def guarded_generate(original: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    @functools.wraps(original)
    def generate(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        state: GeneratorState | None = getattr(self, STATE, None)
        if state is None:
            raise RuntimeError(
                "vllm_compat: this VllmHiddenStatesGenerator was built before vllm_compat was active, so its "
                "workers do not carry our extension. Import vllm_compat first and build the generator again."
            )
        if state.pid != os.getpid():
            raise RuntimeError(
                f"vllm_compat: this generator belongs to process {state.pid}, and this is its forked child "
                f"{os.getpid()}. Two processes cannot share its workers; build a generator of its own here."
            )
        if not state.lock.acquire(blocking=False):
            raise RuntimeError(
                "vllm_compat: generate() is already running on this generator in another thread. One generator "
                "serves one call at a time; use one generator per thread."
            )
        try:
            if reason := state.broken or _workers_unusable(self.executor):
                first = self.executor.first_error()
                more = f"\nA worker had failed: {first}" if first else ""
                raise RuntimeError(
                    f"vllm_compat: this generator cannot be used any more: {reason}. Build a new one.{more}"
                )
            self.executor.forget_errors()  # of a rank that came to the end of the last call after its rows did
            model = self.vllm_config.model_config
            prompts = checked_prompts(token_ids, model.get_vocab_size())
            cut = [prompt[: model.max_model_len - 1] for prompt in prompts]  # as the consumer does
            state.lengths = [len(prompt) for prompt in cut]
            # Until the call is over, cleaned up included, whatever interrupts it leaves the generator unusable.
            state.broken = "its last call was interrupted"
            with generator_in_use(self):
                try:
                    if self.scheduler.requests:  # left by a call that vllm_compat did not see
                        self.scheduler.abort_all()
                    results = original(self, prompts)
                    # A rank whose reply nobody waits for may have failed after its part of the rows (while sampling),
                    # and gone into the next step from a state of its own.
                    if first := self.executor.first_error():
                        raise RuntimeError(f"vllm_compat: a worker failed: {first}")
                    _check_results(self, cut, results)
                except Exception as error:
                    # An interrupt may have come where nothing tells (a step that no worker has heard of), so it leaves
                    # the generator as it is.
                    state.broken = _clean_up(self, error)
                    if state.broken:
                        # A rank whose reply nobody waits for may have failed first; this error is the consequence.
                        if first := self.executor.first_error():
                            raise RuntimeError(f"vllm_compat: a worker failed: {first}") from error
                        if self.executor.is_failed:
                            raise RuntimeError(
                                "vllm_compat: a worker process has ended (killed, or out of memory: see the lines "
                                "above and the kernel's log); this generator cannot be used any more"
                            ) from error
                    raise
            state.broken = None
            return results
        finally:
            state.lock.release()

    return generate


def _clean_up(generator: Any, error: Exception) -> str | None:
    """Return the generator to an empty state; the answer says why that was not possible, if it was not."""
    executor = generator.executor
    if reason := _workers_unusable(executor):
        return reason
    if generator.scheduler.half_done:
        return f"vLLM's scheduler was stopped in the middle of {generator.scheduler.half_done}"
    try:
        if executor.world_size > 1:
            # A rank that failed alone leaves the others waiting in a collective operation. Their next one would meet
            # the next call's, and mix the two: only ranks that all answer now may go on.
            executor.collective_rpc("_vllm_compat_report", timeout=PATIENCE)
        generator.scheduler.abort_all()
        executor.forget_errors()
    except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
        return f"cleaning up after {_first_line(error)} failed: {_first_line(failure)}"
    return None


def _workers_unusable(executor: Any) -> str | None:
    if executor.is_failed:
        return "its workers are gone"
    if executor.is_shut_down:
        return "it has been shut down"
    if executor.out_of_step is not None:
        return f"replies of its workers may be out of step after {executor.out_of_step}"
    return None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def check_settings(layer_ids: Any, max_model_len: Any) -> None:
    """Before the model loads. Raises ValueError: settings that the consumer would fail on, or not notice, later."""
    if layer_ids is not None:
        if not isinstance(layer_ids, list | tuple) or not layer_ids:
            raise ValueError(
                f"layer_ids: expected a list of decoder layer numbers, at least one, got {layer_ids!r:.80}"
            )
        if wrong := [each for each in layer_ids if isinstance(each, bool) or not hasattr(each, "__index__")]:
            raise ValueError(f"layer_ids: expected whole numbers, got {type(wrong[0]).__name__} {wrong[0]!r:.80}")
    if max_model_len is not None and max_model_len < 2:
        raise ValueError(
            f"max_model_len: expected at least 2 (one token of prompt, one to sample), got {max_model_len}"
        )


def _check_results(generator: Any, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
    """The consumer slices by prompt length; its slices must come out whole, and in the order of the prompts."""
    layers = len(set(generator.layer_ids))
    if len(results) != len(prompts):
        raise RuntimeError(f"vllm_compat: {len(prompts)} prompts went in, {len(results)} results came out")
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        rows = [len(states) for states in result["hidden_states"]]
        if rows != [len(prompt)] * layers:
            raise RuntimeError(
                f"vllm_compat: prompt {index}: expected {layers} layers of {len(prompt)} rows, got rows {rows}"
            )
        if result["input_ids"].tolist() != prompt:
            raise RuntimeError(f"vllm_compat: result {index} is not that of prompt {index}: its input_ids differ")


def stepwise_executor(original: type) -> type:
    class StepwiseExecutor(original):  # type: ignore[valid-type, misc]
        """Knows whether every reply of the workers has been read.

        An error reply to a call that one rank answers has been read whole. After any other failure (a time-out, an
        interrupt, one rank of several failing) unread replies may wait in the queues, and the next call would take
        them for its own.
        """

        out_of_step: str | None = None
        is_shut_down = False

        def shutdown(self) -> None:
            self.is_shut_down = True
            super().shutdown()

        def first_error(self) -> str | None:
            """What a worker left in the mailbox, where there is one (patch "workers")."""
            return None

        def forget_errors(self) -> None:
            """A call has failed and been cleaned up: what it left does not explain a later failure."""

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().collective_rpc(method, *args, **kwargs)
            except BaseException as error:
                answered = isinstance(error, RuntimeError) and str(error).startswith("Worker failed with error")
                single = kwargs.get("unique_reply_rank") is not None or self.world_size == 1
                if not (answered and single):
                    self.out_of_step = f"{method}: {_first_line(error)}"
                raise

    return StepwiseExecutor


def recoverable_scheduler(original: type) -> type:
    class RecoverableScheduler(original):  # type: ignore[valid-type, misc]
        half_done: str | None = None
        """What of vLLM's own was left in the middle: what a signal's handler raises can come between any two lines of
        its accounts of requests and blocks."""

        @contextlib.contextmanager
        def _whole(self, what: str) -> Iterator[None]:
            try:
                yield
            except BaseException as error:
                self.half_done = f"{what} ({_first_line(error)})"
                raise

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            with self._whole("schedule"):
                return super().schedule(*args, **kwargs)

        def add_request(self, *args: Any, **kwargs: Any) -> None:
            with self._whole("add_request"):
                super().add_request(*args, **kwargs)

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            with self._whole("finish_requests"):
                return super().finish_requests(*args, **kwargs)

        def abort_all(self) -> None:
            """Drop every request and let the workers forget them (one empty step carries the finished ids)."""
            from vllm.v1.request import RequestStatus

            with self._whole("abort_all"):
                super().finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED)
                step = super().schedule()
            if step.finished_req_ids:
                current_generator().executor.execute_model(step)

    return RecoverableScheduler


PATCH = Patch(
    id="call-boundary",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    after=("input-order",),
    targets=(
        Rebind(module=GENERATOR, name="MultiprocExecutor", make=stepwise_executor),
        Rebind(module=GENERATOR, name="Scheduler", make=recoverable_scheduler),
        Rebind(module=GENERATOR, name="VllmHiddenStatesGenerator.__init__", make=guarded_init),
        Rebind(module=GENERATOR, name="VllmHiddenStatesGenerator.generate", make=guarded_generate),
    ),
    shapes=(
        Shape(module=GENERATOR, symbol="VllmHiddenStatesGenerator.generate", parameters=("token_ids",)),
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.collective_rpc",
            parameters=("method", "args", "kwargs", "unique_reply_rank"),
        ),
        Shape(
            module="vllm.v1.core.sched.scheduler",
            symbol="Scheduler.finish_requests",
            parameters=("request_ids", "finished_status"),
        ),
    ),
    symptom=(
        "A token id outside the vocabulary kills the worker on the device; after an error in the middle of a call "
        "the next call returns rows of the failed one."
    ),
    cause="speculators 0.3.0 checks no input and has no error path in VllmHiddenStatesGenerator.generate.",
    does=(
        "Checks types and range of all token ids before anything is scheduled, names prompt and position; after an "
        "error aborts what is left, lets the workers forget it, or marks the generator as unusable and says why."
    ),
    retires=RETIRES,
    evidence="call-boundary",
)
