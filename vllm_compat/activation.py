"""Switching on and off, and saying what is on. Every route ends in `wake`.

`activate` before the consumer is imported only arms the import hook; the switches, the installed versions and
their source are read when the consumer is imported. When it is imported already, everything happens at once.
Repeating any of it, by any route, is the same as doing it once.
"""

from __future__ import annotations

import sys

from _vllm_compat_startup import arm, finder
from vllm_compat import discovery, switches
from vllm_compat.errors import CompatError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from vllm_compat.engine import Engine

SCHEMA = 1
_engines: dict[str, Engine] = {}
_reason: str | None = "activate() has not been called"  # why nothing is armed; None if something is


def activate(route: str = "import") -> None:
    """Arms every installed patch set; where the consumer is already imported, patches it now.

    Routes "import" and "explicit" raise CompatError on problems, now or when the consumer is imported; any
    other is ambient: problems become one warning line and the consumer stays as it is. With VLLM_COMPAT=0
    does nothing.
    """
    global _reason
    if switches.read().off:
        _reason = "VLLM_COMPAT=0"
        return
    names = [entry.name for entry in discovery.entry_points()]
    _reason = None if names else _no_patches()
    present = [name for name in names if name in sys.modules]
    arm([name for name in names if name not in present], route)
    for name in present:
        _engine(name).wake(route)


def _no_patches() -> str:
    from vllm_compat.log import say

    text = (
        f"no installed package brings patches (entry-point group {discovery.GROUP}), so nothing will be "
        "patched; a source tree on PYTHONPATH has no entry points: install it with pip"
    )
    say(30, text)
    return text


def wake(name: str, route: str) -> None:
    """The consumer `name` is about to be imported. Called by the import hook."""
    global _reason
    _reason = None
    _engine(name).wake(route)


def _engine(name: str) -> Engine:
    from vllm_compat.engine import Engine

    # Each engine registers with the process for good (os.register_at_fork): none is made to be thrown away.
    return _engines.get(name) or _engines.setdefault(name, Engine(name))


def deactivate() -> tuple[str, ...]:
    """Takes everything back; later imports of a consumer are not patched until `activate` is called again.

    Every binding gets back the very object it had. Returns what could not be taken back, because somebody
    else has changed the binding since (it is left as it is).
    """
    global _reason
    _reason = "deactivate() was called"
    finder().declined = True
    finder().routes.clear()
    return tuple(text for engine in list(_engines.values()) for text in engine.undo())


def _state(name: str) -> tuple[str, str | None]:
    """State and reason of one consumer."""
    engine = _engines.get(name)
    if engine is not None and engine.state != "idle":
        return engine.state, engine.reason
    if name in finder().routes:
        return "armed", f"waiting for the import of {name}"
    return "idle", _reason or f"{name} was imported without the import hook"


def status() -> dict[str, Any]:
    """What is on in this process, as plain data.

    `active`: patches are applied or will be when their module is imported. `state` of each consumer: armed
    (waiting for its import), awake (patching), off (VLLM_COMPAT=0), failed, idle; `reason` says why. `routes`: every
    way by which vllm_compat came into this process, in order; a forked child has inherited its parent's.
    """
    from vllm_compat import __version__, ledger

    consumers = []
    for name in sorted({*_engines, *finder().routes}):
        engine = _engines.get(name)
        state, reason = _state(name)
        plan = engine.plan if engine else None
        consumers.append(
            {
                "consumer": name,
                "state": state,
                "reason": reason,
                "route": (engine and engine.route) or finder().routes.get(name),
                "versions": {each.module: each.version for each in plan.packages} if plan else {},
                "problems": list(plan.problems) if plan else [],
                "warnings": list(plan.warnings) if plan else [],
                "not_undone": list(engine.left) if engine else [],
            }
        )
    pid = ledger.pid()
    return {
        "schema": SCHEMA,
        "version": __version__,
        "pid": pid,
        "active": any(each["state"] == "awake" for each in consumers),
        "route": next((each["route"] for each in consumers if each["route"]), None),
        "routes": [
            {"route": route, "pid": taken_in, "inherited": taken_in != pid} for route, taken_in in finder().taken
        ],
        "reason": _reason,
        "consumers": consumers,
        "patches": ledger.entries(),
        "workers": ledger.workers(),
    }


def require() -> None:
    """Raises CompatError unless every patch that applies is in place, or will be at the consumer's import."""
    names = [entry.name for entry in discovery.entry_points()]
    problems = [] if names else ["no installed package brings patches"]
    for name in names:
        state, reason = _state(name)
        if state == "awake":
            problems += [f"{text} is not in place" for text in _engines[name].missing()]
        elif state == "armed":
            from vllm_compat.plan import plans

            ours = (each for each in plans() if each.packages[0].module == name)
            problems += [text for each in ours for text in each.problems]
        else:
            problems.append(f"{name} is not patched ({state}): {reason}")
    if problems:
        lines = "\n".join(f"  - {text}" for text in problems)
        raise CompatError(f"vllm_compat is required here, but:\n{lines}")
