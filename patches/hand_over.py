"""Seam "hand-over": hidden states reach the parent through shared memory, not pickled through a message queue."""

from __future__ import annotations

import logging
import mmap
import os
import stat
from typing import Any

from vllm_compat.log import say
from vllm_compat.patches._host import give_back_freed_memory, keep_freed_memory
from vllm_compat.patches._names import CONSUMER, FETCH, GENERATOR, RETIRES
from vllm_compat.patches.reply_shape import list_of_one_reply
from vllm_compat.registry import Patch, Rebind, Shape


def sharing_executor(original: type) -> type:
    class SharingExecutor(original):  # type: ignore[valid-type, misc]
        understands_descriptions = True
        _can_map = True
        _mapped: tuple[tuple[int, int, int], mmap.mmap] | None = None

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            if method != FETCH:
                return reply
            if isinstance(reply, list):  # vLLM 0.11.0: a list of one, as the consumer takes it
                return [self._rows(description) for description in reply]
            return self._rows(reply)

        def _rows(self, description: dict[str, Any]) -> list[Any]:
            """One tensor ``[tokens, hidden]`` per layer, in the worker's memory: valid until the next call."""
            for warning in description["warnings"]:
                say(logging.WARNING, warning)
            if description["call"] != self.call_number:
                self.out_of_step = f"a reply to call {description['call']} came in call {self.call_number}"
                raise RuntimeError(f"vllm_compat: {self.out_of_step}")
            keep_freed_memory(self, description["bytes"])
            if self._can_map:
                try:
                    if description["fd"] is None:
                        raise OSError(description["why_not_shared"])
                    memory = self._map(description["pid"], description["fd"], description["bytes"])
                    return rows_in(memory, description["shape"], description["dtype"])
                except OSError as error:
                    self._can_map = False
                    text = (
                        f"the worker's memory cannot be shared ({error}); hidden states are copied through vLLM's "
                        "message queue instead, which is slower and gives the same bytes"
                    )
                    say(logging.WARNING, text)
            reply = super().collective_rpc("_vllm_compat_rows_by_value", unique_reply_rank=0)
            values: list[Any] = list_of_one_reply(reply)[0]
            return values

        def shutdown(self) -> None:
            """The workers' memory goes when they do, not when the last reference to this executor does."""
            super().shutdown()
            self._mapped = None
            give_back_freed_memory(self)

        def _map(self, pid: int, fd: int, size: int) -> mmap.mmap:
            """Map the worker's anonymous file through its descriptor: it has no name to guess or to leave behind."""
            descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size < size:
                    raise OSError(f"descriptor {fd} of process {pid} is not the memory it described")
                key = (pid, status.st_ino, size)
                if self._mapped is None or self._mapped[0] != key:
                    self._mapped = (key, mmap.mmap(descriptor, size))
                return self._mapped[1]
            finally:
                os.close(descriptor)

    return SharingExecutor


def rows_in(memory: mmap.mmap, shape: tuple[int, int, int], dtype: str) -> list[Any]:
    import torch

    layers, tokens, hidden = shape
    rows = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=layers * tokens * hidden)
    return list(rows.view(shape).unbind(0))


PATCH = Patch(
    id="hand-over",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    after=("two-phase-execution",),
    needs=("capture",),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=sharing_executor),),
    shapes=(
        Shape(
            module="vllm.v1.executor.multiproc_executor",
            symbol="MultiprocExecutor.collective_rpc",
            parameters=("unique_reply_rank",),
        ),
    ),
    symptom="86 % of an extraction's time is one pickled reply (speculators#322)",
    cause="The worker's reply is pickled, cut into chunks and rebuilt (vllm/distributed/device_communicators)",
    does=(
        "The worker copies rows step by step into an anonymous file (memfd) that the parent maps; the reply is its "
        "description. Where that is not possible: vLLM's message queue, with one warning."
    ),
    retires=RETIRES,
    evidence="hand-over",
)
