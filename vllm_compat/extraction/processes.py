"""Replicas as processes of this machine.

A replica is like a Ray actor: it is built in its own process, calls to it are futures, and a lost one is replaced and
its calls are made again, up to `max_restarts` times. The parent opens no device: each replica's process is started
afresh and sees only its own devices.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from vllm_compat.extraction.dispatch import DEPTH
from vllm_compat.extraction.replica import Pending, Replica, ReplicaSettings
from vllm_compat.extraction.streams import say

PATIENCE = 30.0  # seconds that a replica may take to end


class ReplicaLost(RuntimeError):
    """A replica's process has ended more often than it may."""


class ProcessReplica:
    def __init__(
        self, number: int, settings: ReplicaSettings, environment: Mapping[str, str], *, max_restarts: int
    ) -> None:
        self.name = f"replica {number}"
        self.restarts = 0
        self._settings, self._environment, self._max_restarts = settings, dict(environment), max_restarts
        self._lock = threading.RLock()
        self._calls: dict[int, tuple[Future[Any], str, tuple[Any, ...]]] = {}
        self._next = 0
        self._closed = False
        self._load = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: vLLM starts workers of its own, which daemons may not.
        self._process = context.Process(
            target=serve, args=(theirs, self._settings, self._environment), name=self.name, daemon=False
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._read, args=(self._pipe, self._process), daemon=True).start()

    def load(self) -> Future[Any]:
        """Load the model, now and after each loss; the future has the replica's Facts."""
        self._load = True
        return self.call("load")

    def call(self, name: str, *args: Any) -> Future[Any]:
        """Call a method of the Replica there. ReplicaLost if it cannot be had any more."""
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._calls[number] = (future, name, args)
            with contextlib.suppress(OSError):  # a loss is noticed by who reads
                self._pipe.send((number, name, args))
        return future

    def _read(self, pipe: Connection, process: Any) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, good, answer = pipe.recv()
                with self._lock:
                    future, _, _ = self._calls.pop(number, (None, "", ()))
                if future is not None:
                    (future.set_result if good else future.set_exception)(answer)
        self._ended(process)

    def _ended(self, process: Any) -> None:
        process.join(PATIENCE)
        with self._lock:
            if self._closed:
                return
            said = f"{self.name} has ended (exit code {process.exitcode})"
            if self.restarts < self._max_restarts:
                self.restarts += 1
                say(f"{said}: it is replaced, for the {self.restarts}. of at most {self._max_restarts} times")
                self._start()
                again = dict(self._calls)
                if self._load and not any(name == "load" for _, name, _ in again.values()):
                    with contextlib.suppress(OSError):
                        self._pipe.send((-1, "load", ()))
                for number, (_, name, args) in again.items():
                    with contextlib.suppress(OSError):
                        self._pipe.send((number, name, args))
                return
            calls, self._calls = self._calls, {}
        if self.restarts:
            said += f", and was replaced {self.restarts} times before"
        # On lines of their own: who has asked to stop is shown the first line only, and needs no advice.
        lines = [said]
        if process.exitcode == -signal.SIGKILL:
            lines.append(
                f"Exit code {process.exitcode} is a kill, mostly for lack of memory (see the kernel's log): fewer "
                "replicas, a smaller --write-queue or, for a new --output-dir, a smaller --batch-size"
            )
        lines.append("--max-restarts allows more losses")
        for future, _, _ in calls.values():
            future.set_exception(ReplicaLost("\n".join(lines)))

    def drain(self) -> None:
        """Let it finish what it computes and writes, and nothing more: all other calls are answered with None, at once
        even while it loads. It is not replaced any more."""
        self._max_restarts = 0
        self.call("drain")

    def close(self) -> None:
        """Let the process end: it notices that nobody is at the other end, and ends its workers first."""
        with self._lock:
            self._closed = True
            # Not closed: the thread that reads would keep it open, and the process would notice nothing.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as other:
                other.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(pipe: Connection, settings: ReplicaSettings, environment: Mapping[str, str]) -> None:
    """The replica's process. Calls of `load` and `compute` run in the main thread, one after the other."""
    os.setsid()  # Ctrl-C is for the parent, which lets us finish; vLLM's workers would end at once
    os.environ.update(environment)  # before torch is imported
    os.dup2(2, 1)
    if settings.verbose:
        logging.basicConfig(level=logging.INFO)
    todo: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()
    replica: Replica | None = None
    sending = threading.Lock()
    draining = threading.Event()

    def answer(number: int, function: Any, *args: Any) -> None:
        try:
            good, value = True, function(*args)
        except BaseException as error:  # noqa: BLE001 - all of it is the caller's
            good, value = False, portable(error)
        with sending, contextlib.suppress(OSError):
            pipe.send((number, good, value))

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                call = pipe.recv()
                if call[1] == "drain":
                    draining.set()
                    if replica is not None:
                        replica.drain()
                if not draining.is_set():
                    todo.put(call)
                    continue
                # Answered here, also what waits: the main thread may be loading a replacement's model for minutes.
                answer(call[0], _nothing, None)
                with contextlib.suppress(queue.Empty):
                    while True:
                        answer(todo.get_nowait()[0], _nothing, None)
        _leave(replica)

    threading.Thread(target=read, daemon=True).start()
    failure: BaseException | None = None
    try:
        replica = Replica(settings)
    except BaseException as error:  # noqa: BLE001 - told to whoever calls
        failure = error
    with ThreadPoolExecutor(max_workers=DEPTH) as settling:
        while True:
            number, name, args = todo.get()
            if draining.is_set():  # it may have been set before there was a Replica to tell
                answer(number, _nothing, None)
            elif failure is not None:
                answer(number, _raise, failure)
            elif name == "compute":
                try:
                    pending = replica.compute(*args)  # type: ignore[union-attr]
                except BaseException as error:  # noqa: BLE001
                    answer(number, _raise, error)
                else:
                    settling.submit(answer, number, Pending.result if pending else _nothing, pending)
            elif name == "load":
                try:
                    answer(number, _returned, replica.load())  # type: ignore[union-attr]
                except BaseException as error:  # noqa: BLE001
                    failure = error
                    answer(number, _raise, failure)
            else:
                answer(number, getattr(replica, name), *args)


def _nothing(_pending: None) -> None:
    return None


def _returned(value: Any) -> Any:
    return value


def _raise(error: BaseException) -> None:
    raise error


def _leave(replica: Replica | None) -> None:
    """The parent has closed the pipe, or is gone. Whatever is being computed, the workers end before we do."""
    with contextlib.suppress(Exception):
        if replica is not None:
            replica.close()
    sys.stderr.flush()
    os._exit(0)


def portable(error: BaseException) -> BaseException:
    """The error as one that another process can read: itself where it pickles, else a RuntimeError with its text."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
