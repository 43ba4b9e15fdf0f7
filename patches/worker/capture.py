"""Capture: from the taps of each step to the rows of a whole call."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.patches._models import PIPELINE, SEQUENCE
from vllm_compat.patches.worker.call import CallBook, Span
from vllm_compat.patches.worker.copies import Copies
from vllm_compat.patches.worker.labels import check_runner, step_labels, watch_batches
from vllm_compat.patches.worker.mailbox import Post
from vllm_compat.patches.worker.meaning import Meaning
from vllm_compat.patches.worker.rows import HostRows
from vllm_compat.patches.worker.taps import decoder_layers, residual_stream, tap

if TYPE_CHECKING:
    import torch


class WorkerError(RuntimeError):
    """An error of the model's forward, with the traceback of the worker in its text.

    vLLM sends the parent only the text of a worker's exception (``WorkerProc.enqueue_output``).
    """


@dataclass
class Step:
    """One pass of the model: what the taps have brought so far."""

    scheduler_output: Any
    layers: set[int] = field(default_factory=set)  # those that have run
    batch: Any = None  # Model Runner V2's
    spans: list[Span] | None = None  # where the rows go, once the first have come


class Capture:
    """One worker's side of the extraction. Rank 0 of the tensor-parallel group keeps rows; the others only report."""

    def __init__(self, worker: Any, layer_ids: list[int]) -> None:
        if not layer_ids:
            raise ValueError("vllm_compat: layer_ids is empty: expected at least one decoder layer")
        self.layer_ids = sorted(set(layer_ids))
        self.rank = worker.rank
        self._runner = worker.model_runner
        self._keeps_rows = _is_first_rank(worker)
        self._book: CallBook | None = None
        self._error: BaseException | None = None
        self._step: Step | None = None
        self._host = HostRows()
        self._copies = Copies()
        self._post = Post()
        check_runner(self._runner)
        model = self._runner.get_model()
        layers = decoder_layers(model, _number_of_layers(worker))
        self._meaning = Meaning(model, layers, self._runner.dtype)
        if self._keeps_rows:
            tap(layers, self.layer_ids, self._keep)
        self._watch_steps()
        watch_batches(self._runner, self._note_batch)

    def _watch_steps(self) -> None:
        """Stand around this worker's ``model_runner.execute_model`` and ``sample_tokens`` (this instance only)."""
        run = self._runner.execute_model

        @functools.wraps(run)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.heard()
            self._step = Step(scheduler_output)
            try:
                output = run(scheduler_output, *args, **kwargs)
            except Exception as error:
                self._step = None
                raise self._reported(error) from error
            step, self._step = self._step, None
            if self._book is not None and self._error is None:
                self._noting_errors(self._end_step, self._book, step)
            return output

        self._runner.execute_model = execute_model
        if hasattr(self._runner, "sample_tokens"):  # vLLM 0.11.0 samples within execute_model
            self._watch_sampling()

    def _note_batch(self, batch: Any) -> None:
        if self._step is not None:
            self._step.batch = batch

    def _watch_sampling(self) -> None:
        sample = self._runner.sample_tokens

        @functools.wraps(sample)
        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            self.heard()
            try:
                return sample(*args, **kwargs)
            except Exception as error:
                raise self._reported(error) from error

        self._runner.sample_tokens = sample_tokens

    def _reported(self, error: Exception) -> WorkerError:
        text = (
            f"{type(error).__name__}: {error}\n--- traceback of worker rank {self.rank} (process {os.getpid()}) ---\n"
            f"{traceback.format_exc()}--- end of the worker's traceback ---"
        )
        if not self._keeps_rows:  # the parent listens to the rank that does
            self._post.leave(text)
            self._post.wait_for_the_others()
        return WorkerError(text)

    def heard(self) -> None:
        """The parent has called this rank, so it is not waiting in vain for another one."""
        self._post.heard()

    def _noting_errors(self, function: Callable[..., None], *args: Any) -> None:
        """Keep the first error for the end of the call: all ranks go on alike, so that none waits for another."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - raised by hand_over
            self._error = self._error or error

    def _keep(self, layer_id: int, layer: str, output: Any) -> None:
        if self._step is not None and self._book is not None:  # not in a warm-up run
            self._noting_errors(self._keep_rows, self._book, self._step, layer_id, layer, output)

    def _keep_rows(self, book: CallBook, step: Step, layer_id: int, layer: str, output: Any) -> None:
        if layer_id in step.layers:
            raise RuntimeError(f"vllm_compat: decoder layer {layer_id} ran twice in one step; its rows are not guessed")
        rows = residual_stream(layer, output)
        if rows.dim() != 2:
            raise RuntimeError(
                f"vllm_compat: decoder layer {layer} returned a tensor of shape {list(rows.shape)}, expected [tokens, "
                "hidden]; models of vLLM's Transformers backend are not supported"
            )
        step.layers.add(layer_id)
        self._place(book, step, layer_id, rows)

    def _end_step(self, book: CallBook, step: Step) -> None:
        if not step.scheduler_output.total_num_scheduled_tokens:
            return
        for layer_id in self.layer_ids:
            if layer_id not in step.layers:
                raise self._too_few(book, step, layer_id, 0)

    def _place(self, book: CallBook, step: Step, layer_id: int, rows: torch.Tensor) -> None:
        """Send a layer's rows of a step on their way, beside the layers that follow."""
        scheduled = step.scheduler_output.total_num_scheduled_tokens
        if len(rows) < scheduled:  # more rows are padding behind the batch
            raise self._too_few(book, step, layer_id, len(rows))
        if step.spans is None:
            self._copies.wait()
            if self._host.rows is None:
                self._host.resize(len(self.layer_ids), book.tokens, rows)
                self._copies.begin_call(self._host, rows)
            step.spans = book.place(step_labels(self._runner, step.scheduler_output, step.batch))
            if step.batch is not None:
                self._copies.note_positions(step.batch.positions, step.spans)
        self._copies.add(self.layer_ids.index(layer_id), rows[:scheduled], step.spans)

    @staticmethod
    def _too_few(book: CallBook, step: Step, layer_id: int, got: int) -> RuntimeError:
        scheduled = step.scheduler_output
        ids = ", ".join(book.name(i) for i in scheduled.num_scheduled_tokens)
        return RuntimeError(
            f"vllm_compat: layer {layer_id}: expected {scheduled.total_num_scheduled_tokens} rows of {ids}, got {got}"
        )

    def check_model(self) -> list[float]:
        """A sample of this rank's residual stream (``Meaning.sample``).

        Raises:
            ValueError: the model has run, and what its layers return is not understood.
        """
        self._meaning.refuse_if_known()
        return self._meaning.sample

    def begin_call(self, call: dict[str, Any]) -> None:
        self.heard()
        self._call = call
        self._error = None
        self._host.rows = None
        self._book = CallBook(call["requests"]) if self._keeps_rows else None

    def hand_over(self) -> Any:
        """End the call.

        Returns:
            where ``call["describe"]``: the description of the shared memory (``HostRows.description``) with ``call``
            and ``warnings``; else one CPU tensor ``[tokens, hidden]`` per layer, in model order of the layers.
            None from the ranks that keep no rows, whose reply nobody reads.

        Raises:
            RuntimeError: rows are missing, not finite, or a layer holds one single value; the first error of the call.
        """
        if not self._keeps_rows:
            return None
        book, self._book = self._book, None
        if book is None:
            raise RuntimeError("vllm_compat: _get_captured_states without _reset_capture before it")
        if self._error is not None:
            raise self._error
        self._meaning.check()
        book.check_complete()
        self._check_positions(book)
        warnings = self._check_values(book) + self._host.take_warnings()
        if not self._call["describe"]:
            return self.rows_by_value()
        return self._host.description() | {"call": self._call["call"], "warnings": warnings}

    def _check_positions(self, book: CallBook) -> None:
        """Raises RuntimeError: Model Runner V2's batch was at other positions than the scheduler sent."""
        import torch

        given = self._copies.positions()
        if given is None:
            return
        expected = torch.cat([torch.arange(count) for _, count in book.requests])
        wrong = (given != expected).nonzero()
        if len(wrong):
            name, position = book.owner(int(wrong[0]))
            raise RuntimeError(
                f"vllm_compat: {name}: the model runner computed row {position} at position {int(given[wrong[0]])}"
            )

    def _check_values(self, book: CallBook) -> list[str]:
        faults: list[str] = []
        low, high = self._copies.finish()
        not_finite, single = ~(low.isfinite() & high.isfinite()), low == high
        if not (not_finite | single).any():
            return faults  # as nearly always, and what follows takes a millisecond
        for layer_id, wrong, alike in zip(self.layer_ids, not_finite, single, strict=True):
            bad = wrong.nonzero()[:, 0]
            if len(bad):
                name, position = book.owner(int(bad[0]))
                faults.append(
                    f"{name}, position {position}, layer {layer_id}: hidden state is not finite ({len(bad)} such rows)"
                )
            for name, rows in book.rows_of_each():
                if alike[rows].all():
                    faults.append(
                        f"{name}, layer {layer_id}: each of its {len(alike[rows])} rows holds one single value"
                    )
        if faults and self._call["nonfinite"] == "error":
            raise RuntimeError("vllm_compat: " + "; ".join(faults) + ". VLLM_COMPAT_NONFINITE=warn keeps such rows.")
        return faults

    def rows_by_value(self) -> list[Any]:
        assert self._host.rows is not None
        return [rows.clone() for rows in self._host.rows]


def _is_first_rank(worker: Any) -> bool:
    """Only settings under which each rank holds the whole residual stream are accepted.

    Raises:
        ValueError: pipeline parallelism, or sequence parallelism of mixture-of-experts layers.
    """
    from vllm.distributed.parallel_state import get_tp_group

    parallel = worker.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(f"vllm_compat: {PIPELINE}")
    if getattr(parallel, "use_sequence_parallel_moe", False):
        raise ValueError(f"vllm_compat: {SEQUENCE}")
    return bool(get_tp_group().rank_in_group == 0)


def _number_of_layers(worker: Any) -> int:
    return int(worker.vllm_config.model_config.hf_text_config.num_hidden_layers)
