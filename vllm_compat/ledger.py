"""What was applied in this process, in which order and by which route; and what worker processes reported.

A forked child inherits its parent's patched modules, so it inherits the entries too: they keep the process id
of the process that applied them, and `inherited` says that this was another one. Worker reports belong to the
parent that asked for them and are not inherited. Nothing here is written before it is true: an entry is made
after its target was changed and removed when it was changed back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

_entries: list[dict[str, Any]] = []
_workers: list[dict[str, Any]] = []
os.register_at_fork(after_in_child=_workers.clear)


def record(patch: str, target: str, route: str) -> None:
    """Notes that `patch` has changed `target`; once, however often it is applied."""
    if is_applied(patch, target):
        return
    order = 1 + max((entry["order"] for entry in _entries), default=0)
    _entries.append(
        {
            "patch": patch,
            "target": target,
            "route": route,
            "pid": os.getpid(),
            "order": order,
            "time": time.time(),
        }
    )


def forget(patch: str, target: str) -> None:
    """Notes that the change was taken back."""
    _entries[:] = [entry for entry in _entries if (entry["patch"], entry["target"]) != (patch, target)]


def is_applied(patch: str, target: str) -> bool:
    return any((entry["patch"], entry["target"]) == (patch, target) for entry in list(_entries))


def pid() -> int:
    """Of this process, as it is now: a forked child has its own."""
    return os.getpid()


def entries() -> list[dict[str, Any]]:
    """Copies of the entries, in the order of application."""
    pid = os.getpid()
    return [{**entry, "inherited": entry["pid"] != pid} for entry in list(_entries)]


def add_worker(report: Mapping[str, Any]) -> None:
    """Keeps what a worker process said about itself."""
    _workers.append(dict(report))


def workers() -> list[dict[str, Any]]:
    return [dict(report) for report in list(_workers)]
