"""What is said while working: through `logging` where the program has set it up, else plainly on stderr."""

from __future__ import annotations

import logging
import sys

from vllm_compat.switches import read

_LEVELS = {"debug": 10, "info": 20, "1": 20, "warning": 30, "error": 40, "0": 40}


def say(level: int, text: str, *, least: int = logging.WARNING) -> None:
    """One line. Without any logging set up it is printed from VLLM_COMPAT_LOG (default `least`) upwards."""
    version = getattr(sys.modules.get("vllm_compat"), "__version__", "")
    line = f"vllm_compat {version}: {' '.join(text.split())}"
    logger = logging.getLogger("vllm_compat")
    if logger.hasHandlers():
        logger.log(level, line)
    elif level >= _LEVELS.get(read().log, least) and sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
