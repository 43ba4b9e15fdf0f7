"""The worker extension that vLLM mixes into its worker class (``ParallelConfig.worker_extension_cls``).

It answers the consumer's three calls (``_setup_hidden_states_capture``, ``_reset_capture``, ``_get_captured_states``)
and ours. It does not import the consumer: a worker needs nothing of it.
"""

from __future__ import annotations

import os
from typing import Any

import vllm_compat
from _vllm_compat_startup import finder
from vllm_compat.patches.worker.capture import Capture
from vllm_compat.patches.worker.fingerprint import EXPECTED, WORKER_SIDE, fingerprint
from vllm_compat.patches.worker.labels import class_name
from vllm_compat.patches.worker.mailbox import Post
from vllm_compat.patches.worker.memory import memory_report
from vllm_compat.patches.worker.orphans import end_with_parent

__all__ = ["HiddenStatesWorkerExtension"]

finder().note("worker extension")

if os.environ.get(EXPECTED, fingerprint()) != fingerprint():
    # vLLM imports this module before it builds the worker, so nothing has been loaded yet.
    refusal = (
        f"vllm_compat: this worker (process {os.getpid()}) would run files {fingerprint()} from "
        f"{os.path.dirname(vllm_compat.__file__)}, its parent has {os.environ[EXPECTED]}. Make both use one "
        "installation (PYTHONPATH, virtual environment) and start again."
    )
    Post().leave(refusal)
    raise RuntimeError(refusal)

end_with_parent()


class HiddenStatesWorkerExtension:
    """Mixed into vLLM's worker; ``rank``, ``model_runner`` and ``vllm_config`` are the worker's own."""

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        """Tap the layers of the loaded model.

        Args:
            layer_ids: decoder layer numbers; each tap gives the layer's output, residual added, before the final norm.

        Raises:
            ValueError: the model is not one whose residual stream is understood.
        """
        self._vllm_compat_capture = Capture(self, layer_ids)

    def _reset_capture(self, call: dict[str, Any]) -> None:
        """Begin a call.

        Args:
            call: ``call`` (its number), ``requests`` (list of request id and number of prompt tokens, in the order of
                submission), ``describe`` (the parent maps our memory), ``nonfinite`` ("error" or "warn").
        """
        self._vllm_compat_capture.begin_call(call)

    def _get_captured_states(self) -> Any:
        """End a call: check that every row has come, and hand over (rank 0).

        Returns:
            a description of the shared memory, or the rows themselves: see ``Capture.hand_over``.
        """
        return self._vllm_compat_capture.hand_over()

    def _vllm_compat_check_model(self) -> list[float]:
        """After the first forward pass: see ``Capture.check_model``."""
        return self._vllm_compat_capture.check_model()

    def _vllm_compat_rows_by_value(self) -> list[Any]:
        """The rows of the call that has just been handed over, as CPU tensors ``[tokens, hidden]``, one per layer."""
        return self._vllm_compat_capture.rows_by_value()

    def _vllm_compat_memory(self) -> dict[str, int | None]:
        return memory_report(self)

    def _vllm_compat_report(self) -> dict[str, Any]:
        """What this process really has, not what its parent believes.

        ``patches`` are the ids whose worker part answers on this very object; ``routes`` the ways by which vllm_compat
        came into this process, in order, and ``inherited`` those that a forked worker has from its parent.
        """
        if hasattr(self, "_vllm_compat_capture"):
            self._vllm_compat_capture.heard()
        pid = os.getpid()
        taken = finder().taken
        return {
            "pid": pid,
            "rank": self.rank,  # type: ignore[attr-defined]
            "route": "worker extension",
            "routes": [route for route, taken_in in taken if taken_in == pid],
            "inherited": [route for route, taken_in in taken if taken_in != pid],
            "version": vllm_compat.__version__,
            "patches": sorted(id for id, names in WORKER_SIDE.items() if all(_is_ours(self, name) for name in names)),
            "worker": class_name(self),
            "model_runner": class_name(self.model_runner),  # type: ignore[attr-defined]
            "fingerprint": fingerprint(),
        }


def _is_ours(worker: Any, name: str) -> bool:
    """Whether this worker's method is the one written here, and not covered by another class or an attribute."""
    return name not in vars(worker) and getattr(type(worker), name, None) is vars(HiddenStatesWorkerExtension)[name]
