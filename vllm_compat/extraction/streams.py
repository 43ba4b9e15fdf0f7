"""stdout is for the answer alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is written to stdout to stderr, by this process and by those it starts.

    On the level of file descriptors: vLLM's workers and gloo's C++ code print to the inherited descriptor 1,
    which no Python object sees.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
