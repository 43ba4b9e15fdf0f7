"""A worker ends with its parent, also while it loads the model.

vLLM tells its workers of their parent's death by an event that only the loop of calls looks at. A rank that has loaded
the model and waits for the parent's first word (``MessageQueue.wait_until_ready`` in ``WorkerProc.worker_main``,
vllm/v1/executor/multiproc_executor.py, 0.16.0) would wait for ever, and keep its device memory.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

PATIENCE = 10.0
"""Seconds that vLLM has to end the worker in its own way."""


def end_with_parent() -> None:
    """Watch the process that has started this one, from a thread; do nothing in a program's first process.

    Its process id is compared once a second: the pipe that ``multiprocessing`` has for this end stays open in workers
    that were forked later.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(1)
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=watch, name="vllm_compat-orphan", daemon=True).start()
