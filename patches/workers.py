"""Seam "workers": a start method that works, and proof that the extension in each worker is ours."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from vllm_compat import ledger
from vllm_compat.errors import CompatError
from vllm_compat.log import say
from vllm_compat.patches._host import copying_threads
from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES, START_METHOD
from vllm_compat.patches.worker.fingerprint import EXPECTED, WORKER_SIDE, fingerprint
from vllm_compat.patches.worker.mailbox import PATH, Mailbox
from vllm_compat.registry import Patch, Rebind, Shape

_one_at_a_time = threading.Lock()  # workers read the environment of this process, which is one for all its threads


def proven_executor(original: type) -> type:
    class ProvenExecutor(original):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Read by the extension when the worker imports it, which is before the worker loads the model.
            self._mailbox = Mailbox()
            settings = {EXPECTED: fingerprint(), PATH: self._mailbox.path, **_start_method()}
            try:
                with _one_at_a_time, _environment(settings), _safe_to_fork() as threads:
                    super().__init__(*args, **kwargs)
                    _copy_beside(self.world_size, threads)
            except Exception as error:
                # vLLM says "see stack trace"; a refusal of ours is the better text.
                if first := self.first_error():
                    raise CompatError(first) from error
                raise
            try:
                self._check_workers()
            except BaseException:
                self.shutdown()
                raise

        def first_error(self) -> str | None:
            return self._mailbox.read()

        def forget_errors(self) -> None:
            self._mailbox.clear()

        def _check_workers(self) -> None:
            """Every rank answers for itself.

            Raises:
                CompatError: a worker has other files than this process, or another class answers in place of ours.
            """
            expected = fingerprint()
            reports = self.collective_rpc("_vllm_compat_report")
            ranks = sorted(report["rank"] for report in reports)
            if ranks != list(range(self.world_size)):
                raise CompatError(
                    f"vllm_compat: expected reports of the worker ranks 0 to {self.world_size - 1}, got {ranks}"
                )
            for report in reports:
                if report["fingerprint"] != expected:
                    raise CompatError(
                        f"vllm_compat: worker rank {report['rank']} (process {report['pid']}) runs vllm_compat "
                        f"{report['version']} with files {report['fingerprint']}, this process has {expected}. "
                        "Make both use one installation (PYTHONPATH, virtual environment) and start again."
                    )
                applied = {entry["patch"] for entry in ledger.entries()}
                if missing := sorted(applied & WORKER_SIDE.keys() - set(report["patches"])):
                    raise CompatError(
                        f"vllm_compat: in worker rank {report['rank']} (process {report['pid']}, {report['worker']}) "
                        f"something else answers for {', '.join(missing)}. Use no other worker extension or plugin "
                        "that replaces these methods."
                    )
                ledger.add_worker(report)

    return ProvenExecutor


def _start_method() -> dict[str, str]:
    """Spawn where this process has initialised the CUDA driver, since forked children could not use theirs.

    vLLM itself looks at ``torch.cuda.is_initialized()``, which is False after a mere question for the device count
    although the driver is initialised (vllm#12754).
    """
    if not cuda_driver_is_initialised():
        return {}
    chosen = os.environ.get(START_METHOD)
    if chosen == "fork":
        raise CompatError(
            f"vllm_compat: {START_METHOD}=fork, but this process has already initialised CUDA (torch.cuda or "
            "torch.accelerator was asked for devices), and forked workers could not. Unset it or set it to 'spawn'."
        )
    if chosen is None:
        say(logging.WARNING, "CUDA is already initialised in this process: workers are spawned, not forked")
    return {START_METHOD: "spawn"}


def cuda_driver_is_initialised() -> bool:
    """Whether somebody has called ``cuInit`` in this process, found out without doing it.

    Open device files do not tell: NVML, which vLLM asks for the platform, opens the same ones and does no harm. The
    driver, if it is loaded at all, answers a question for the device count with "not initialised" and stays so (CUDA
    Driver API: every function but cuInit returns CUDA_ERROR_NOT_INITIALIZED until cuInit has been called).
    """
    not_initialised = 3
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except (AttributeError, OSError):  # no such flag on this platform, or nobody has loaded the driver
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != not_initialised


@contextlib.contextmanager
def _safe_to_fork() -> Iterator[int]:
    """One host thread, here and for the workers, while workers are forked; gives how many this process had.

    Threads of GNU OpenMP do not live on in a forked child: once it wants several it waits for them for ever, if this
    process has ever used them. vLLM 0.16 and 0.25 see to it themselves, but not where OMP_NUM_THREADS is set, by the
    user or by vLLM for an earlier generator; 0.32 does not (``set_multiprocessing_worker_envs``).
    """
    import torch

    threads = torch.get_num_threads()
    forked = os.environ.get(START_METHOD, "fork") == "fork"
    if forked:
        torch.set_num_threads(1)
    try:
        with _environment({"OMP_NUM_THREADS": "1"} if forked else {}):
            yield threads
    except BaseException:
        torch.set_num_threads(threads)
        raise


_own, _ours = 0, 0  # host threads that this process had by itself, and those set in their place


def _copy_beside(workers: int, threads: int) -> None:
    """With the one thread that vLLM leaves to this process the consumer would copy hidden states on a single core.

    threads: how many there were before the workers started, by an earlier generator's workers or by itself.
    """
    import torch

    global _own, _ours
    if threads != _ours:
        _own = threads
    _ours = copying_threads(_own, workers)
    torch.set_num_threads(_ours)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


PATCH = Patch(
    id="workers",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    needs=("call-boundary", "capture"),
    targets=(Rebind(module=GENERATOR, name="MultiprocExecutor", make=proven_executor),),
    shapes=(
        Shape(module="vllm.v1.executor.multiproc_executor", symbol="MultiprocExecutor._init_executor"),
        Shape(module="vllm.v1.executor.multiproc_executor", symbol="MultiprocExecutor.shutdown"),
    ),
    symptom=(
        "Cannot re-initialize CUDA in forked subprocess; without an error: wrong rows, because a spawned worker does "
        "not have what was patched in the parent only"
    ),
    cause="vLLM starts workers by fork or spawn depending on the platform and on what ran before (vllm#12754, #18326)",
    does=(
        "Spawns workers where CUDA is already open in the parent; each worker compares its vllm_compat files with the "
        "parent's before it loads the model, and reports process, rank and files to the parent, which checks them."
    ),
    retires=RETIRES,
    evidence="workers",
)
