"""A worker ends with its parent, also while it loads the model.

vLLM tells its workers of their parent's death by an event that only the loop of calls looks at. A rank that has loaded
the model and waits for the parent's first word (``MessageQueue.wait_until_ready`` in ``WorkerProc.worker_main``,
vllm/v1/executor/multiproc_executor.py, 0.16.0) would wait for ever, and keep its device memory.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time

PATIENCE = 10.0
"""Seconds that vLLM has to end the worker in its own way."""


def end_with_parent() -> None:
    """Watch the process that has started this one, from a thread; do nothing in a program's first process.

    Process ids are compared once a second: the pipe that ``multiprocessing`` has for this end stays open in workers
    that were forked later.
    """
    parent, above = multiprocessing.parent_process(), os.getppid()
    if parent is None or above == 0:  # 0: in another namespace of processes
        return
    import psutil  # vLLM's own; looked for in a worker only

    def watch() -> None:
        # A wrapper around the interpreter may stand between the two; or the parent died before this began.
        while os.getppid() == above and (above == parent.pid or psutil.pid_exists(parent.pid)):
            time.sleep(1)
        time.sleep(PATIENCE)
        print(f"vllm_compat: worker process {os.getpid()} ends, since its parent {parent.pid} has", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=watch, name="vllm_compat-orphan", daemon=True).start()
