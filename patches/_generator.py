"""Which generator of the consumer is at work in this thread.

The consumer's own loop calls free names (``Request``, ``torch.cuda.mem_get_info``, ``get_kv_cache_config_from_groups``)
that say nothing about the generator they are called for. The patch "call boundary" sets it; the others read it.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STATE = "_vllm_compat_state"
_in_use: contextvars.ContextVar[Any] = contextvars.ContextVar("vllm_compat_generator")


@dataclass
class GeneratorState:
    """What we keep beside one generator."""

    lock: threading.Lock = field(default_factory=threading.Lock)  # against two calls at once
    pid: int = field(default_factory=os.getpid)
    broken: str | None = None  # why it cannot be used any more
    lengths: list[int] = field(default_factory=list)  # tokens of each prompt of the call, as the consumer cuts them


@contextlib.contextmanager
def generator_in_use(generator: Any) -> Iterator[None]:
    token = _in_use.set(generator)
    try:
        yield
    finally:
        _in_use.reset(token)


def current_generator() -> Any:
    """The consumer's generator whose ``__init__`` or ``generate`` runs in this thread.

    Raises:
        RuntimeError: there is none, because one of the generator's parts was used outside of it.
    """
    try:
        return _in_use.get()
    except LookupError:
        raise RuntimeError(
            "vllm_compat: a part of VllmHiddenStatesGenerator was used outside of its __init__ and generate. "
            "Expected calls through the generator only; build one after `import vllm_compat`."
        ) from None
