"""Replicas as actors of a Ray cluster.

Ray places them (one placement group for each, packed onto one node, since a replica's tensor-parallel workers share
memory), gives them their devices, starts lost ones anew on whichever node has room (`max_restarts`), and makes their
calls again (`max_task_retries`). What a replica does is the same as in a process of one machine: `replica.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from concurrent.futures import Future
from typing import Any

from vllm_compat.extraction.dispatch import DEPTH
from vllm_compat.extraction.processes import ProcessReplica, ReplicaLost
from vllm_compat.extraction.replica import LOST, ReplicaSettings
from vllm_compat.extraction.streams import say

PASSED_ON = ("VLLM_", "HF_", "OMP_", "NCCL_", "TOKENIZERS_")  # variables of the environment that replicas are given
ANSWERS_WITHIN = 10.0  # seconds
PATIENCE = 30.0  # seconds that an actor may take to end


class Actor:
    """Holds a replica's process, as a single machine does. vLLM thus sees no Ray: inside a placement group it would
    name Ray as its executor's backend, though speculators brings another executor.

    Methods run in threads of Ray's, several at once. If the replica's process is lost, the actor ends too, and Ray
    starts another where there is room.
    """

    def __init__(self, settings: ReplicaSettings, load: bool) -> None:
        self._replica = ProcessReplica(0, settings, {}, max_restarts=0)
        self._facts = self._replica.load() if load else None  # now, and each time that Ray makes this actor again

    def load(self) -> Any:
        return self._facts and _answer(self._facts)

    def call(self, name: str, *args: Any) -> Any:
        return _answer(self._replica.call(name, *args))

    def drain(self) -> None:
        self._replica.drain()

    def close(self) -> None:
        self._replica.close()
        self._replica.join()


def _answer(future: Future[Any]) -> Any:
    try:
        return future.result()
    except ReplicaLost:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(LOST)


class RayReplica:
    def __init__(self, number: int, settings: ReplicaSettings, bundle: dict[str, float], *, max_restarts: int) -> None:
        self.name, self.restarts = f"replica {number}", 0
        self._settings, self._bundle, self._max_restarts = settings, bundle, max_restarts
        self._group: Any = None
        self._actor: Any = None

    def _start(self, *, load: bool) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = placement_group([self._bundle], strategy="STRICT_PACK")
        own = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        self._actor = (
            ray.remote(Actor)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                resources=own,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=0
                ),
                max_restarts=self._max_restarts,
                # As long as there are restarts. A lost machine cannot be reached for seconds before Ray starts its
                # actors anew, and each try until then counts.
                max_task_retries=-1,
                max_concurrency=DEPTH + 2,  # beside the batches: drain and close
                runtime_env={"env_vars": variables},
            )
            .remote(self._settings, load)
        )

    def load(self) -> Future[Any]:
        self._start(load=True)
        return self.call("load")

    def call(self, name: str, *args: Any) -> Future[Any]:
        if self._actor is None:
            self._start(load=False)
        answer: Future[Any] = Future()
        asked = self._actor.load.remote() if name == "load" else self._actor.call.remote(name, *args)
        asked.future().add_done_callback(lambda done: _pass_on(done, answer))
        return answer

    def drain(self) -> None:
        self._actor.drain.remote()

    def close(self) -> None:
        """Ask it to end its workers; `join` ends it."""
        if self._actor is not None:
            self._closing, self._until = self._actor.close.remote().future(), time.monotonic() + PATIENCE

    def join(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._actor is None:
            return
        with contextlib.suppress(Exception):
            self._closing.result(max(0.0, self._until - time.monotonic()))  # one patience for all that were asked
        ray.kill(self._actor, no_restart=True)
        remove_placement_group(self._group)


def _pass_on(done: Future[Any], answer: Future[Any]) -> None:
    """The error itself, not Ray's around it with the whole traceback in its text."""
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        cause = getattr(error, "cause", None)
        answer.set_exception(cause if isinstance(cause, BaseException) else error)


def join(address: str, *, verbose: bool) -> None:
    """Join the cluster, unless this process has. Raises CompatError without Ray, or if none answers at that address."""
    from vllm_compat.errors import CompatError

    try:
        import ray
    except ImportError:
        raise CompatError("--ray needs Ray on every machine: pip install 'vllm-compat[ray]'") from None
    if not ray.is_initialized():
        try:
            host, _, port = address.rpartition(":")
            if host and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN).close()
            ray.init(address=address, log_to_driver=verbose, logging_level="WARNING")
        except OSError as error:  # a ConnectionError is one
            raise CompatError(
                f"--ray {address}: no Ray cluster answers ({error}). Start one with `ray start --head`, join it with "
                "`ray start --address HEAD:6379` on each machine, or name its address"
            ) from None


def replicas(count: int, settings: ReplicaSettings, *, max_restarts: int) -> list[RayReplica]:
    """Of the cluster that was joined."""
    import ray

    bundle = bundle_of(settings.tensor_parallel_size, ray.cluster_resources())
    _say_what_there_is(ray, count, bundle)
    return [RayReplica(number, settings, bundle, max_restarts=max_restarts) for number in range(count)]


def bundle_of(tensor_parallel_size: int, cluster: dict[str, float]) -> dict[str, float]:
    """What one replica asks Ray for: a device and a core for each worker, on a cluster without devices cores alone."""
    cores = {"CPU": float(tensor_parallel_size)}
    return {**cores, "GPU": float(tensor_parallel_size)} if cluster.get("GPU") else cores


def _say_what_there_is(ray: Any, count: int, bundle: dict[str, float]) -> None:
    """Ray waits without a word for nodes that may still come."""
    room = sum(
        min(int(node["Resources"].get(name, 0) // amount) for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    say(f"Ray: {count} replicas ask for {asked} each; the cluster has room for {room}")
    if room < count:
        say(f"the {'first' if not room else 'other'} replicas wait until nodes join or resources are free")
