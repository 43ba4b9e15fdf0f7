"""The life of one consumer's patches: woken, applied module by module as they are imported, taken back.

    idle -> awake     wake(): the plan is good, modules are watched
    idle -> off       VLLM_COMPAT=0
    any  -> failed    the plan is bad or a change failed: everything is taken back. By an explicit route each
                      further import of a patched module is refused; by an ambient one it stays unpatched
    any  -> idle      undo()

Threads: the import system lets one thread execute a module, and its transaction runs before others may see
the module. The lock guards only what threads share here; it is not held while plans are made or replacements
are built, because both import, and the other threads' import locks could then close a circle.
"""

from __future__ import annotations

import logging
import os
import sys
from _thread import RLock
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from _vllm_compat_startup import EXPLICIT, Finder, finder
from vllm_compat import ledger, patching
from vllm_compat.decisions import Plan
from vllm_compat.errors import CompatError, PatchError, PlanError
from vllm_compat.judge import decide
from vllm_compat.log import say
from vllm_compat.registry import Lend, PatchSet, Rebind, discover, load
from vllm_compat.switches import read

Targets = dict[str, list[tuple[str, Rebind]]]  # module -> patch id and target, in order


class Engine:
    def __init__(self, consumer: str) -> None:
        self.consumer = consumer
        self.state = "idle"
        self.reason: str | None = None  # of the states "off" and "failed"
        self.route: str | None = None
        self.plan: Plan | None = None
        self.left: tuple[str, ...] = ()  # what the last undo could not take back
        self._targets: Targets = {}
        self._records: list[patching.Record] = []
        self._loans: dict[str, list[tuple[str, Lend]]] = {}  # as targets: what a module finds while it is imported
        self._locks: dict[str, Any] = {}  # one for each watched module
        self._lock = RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """A lock that another thread held at the time of the fork would stay locked for ever."""
        self._lock = RLock()
        self._locks = {name: RLock() for name in self._locks}

    def wake(self, route: str) -> None:
        """Plans and starts; safe to call again. Explicit routes raise CompatError, others warn once."""
        if self.state != "awake":
            self.route = route
            given = read()
            if given.off:
                self.state, self.reason = "off", "VLLM_COMPAT=0"
                return
            short = None
            try:
                patch_set = load(self.consumer)
                known = [patch.id for each in discover() for patch in each.patches] if given.disabled else ()
                self.plan = decide(patch_set, switches=given, known=known)
                if not self.plan.ok:
                    first, *others = self.plan.problems
                    more = f" (and {len(others)} more)" if others else ""
                    short = f"{first}{more}; see vllm-compat plan"
                    raise self._refusal(self.plan)
                self._start(patch_set, self.plan)
            except Exception as error:  # noqa: BLE001  # raised again, or told in one line
                self._fail(error, short)
                return
            self._announce(self.plan)
        elif route in EXPLICIT:
            self.route = route
        self._apply_to_present()

    def _refusal(self, plan: Plan) -> CompatError:
        lines = [f"{self.consumer} cannot be patched here:"]
        lines += [f"  - {problem}" for problem in plan.problems]
        lines += ["", plan.table(), ""]
        lines += [f"`vllm-compat plan` shows every decision; VLLM_COMPAT=0 leaves {self.consumer} as it is."]
        return PlanError("\n".join(lines))

    def _start(self, patch_set: PatchSet, plan: Plan) -> None:
        with self._lock:
            if self.state == "awake":
                return  # another thread was first
            applies = [patch for patch in patch_set.patches if patch.id in plan.applies]
            self._targets, self._loans = {}, {}
            for patch in applies:
                for target in patch.targets:
                    targets = self._targets.setdefault(target.module, [])
                    if isinstance(target, Rebind):
                        targets.append((patch.id, target))
                    else:
                        self._loans.setdefault(target.module, []).append((patch.id, target))
            self._locks = {name: RLock() for name in self._targets}
            finder().lending.update(dict.fromkeys(self._loans, self.lend))
            finder().watched.update(dict.fromkeys(self._targets, self.imported))
            self.state, self.reason, self.left = "awake", None, ()

    def lend(self, name: str) -> Callable[[], None]:
        """Before each execution of a module that needs something lent; the answer takes it back."""
        if self.state == "failed" and self.route in EXPLICIT:
            raise PatchError(str(self.reason))
        undos: list[Callable[[], None]] = []

        def take_back() -> None:
            while undos:
                undos.pop()()

        if self.state == "awake":
            for patch, target in self._loans[name]:
                try:
                    undos.append(target.do())
                except Exception as error:  # noqa: BLE001  # as in wake
                    take_back()
                    self._fail(PatchError(f"{patch}: {target} could not be lent: {type(error).__name__}: {error}"))
                    break
                ledger.record(patch, target.name, self.route or "")
        return take_back

    def _announce(self, plan: Plan) -> None:
        """Nobody who has not asked for patches should have them without a word; who has asked knows."""
        least = logging.WARNING if self.route in EXPLICIT else logging.INFO
        say(logging.INFO, f"{plan.headline()} (vllm-compat plan)", least=least)
        if plan.warnings:
            say(logging.WARNING, "; ".join(plan.warnings))

    def _apply_to_present(self) -> None:
        """Late activation: modules imported already; one that is just being imported is waited for."""
        for name in list(self._targets):
            if name in sys.modules:
                self.imported(import_module(name))

    def imported(self, module: ModuleType) -> None:
        """After each execution of a watched module: the first import, a re-import, a reload."""
        name = module.__name__
        with self._locks.setdefault(name, RLock()):
            if self.state == "failed" and self.route in EXPLICIT:
                raise PatchError(str(self.reason))
            if self.state != "awake":
                return
            try:
                new = patching.apply(module, self._targets[name], self._records)
            except Exception as error:  # noqa: BLE001  # as in wake
                self._fail(error)
                return
            with self._lock:
                if self.state != "awake":  # taken back meanwhile
                    patching.undo(new)
                    return
                changed = {(id(each.owner), each.target.name, each.patch) for each in new}
                self._records = [
                    each for each in self._records if (id(each.owner), each.target.name, each.patch) not in changed
                ] + new
                for each in new:
                    ledger.record(each.patch, str(each.target), self.route or "")
        for each in new:
            say(logging.DEBUG, f"{each.patch}: replaced {each.target}")

    def _fail(self, error: Exception, short: str | None = None) -> None:
        text = str(error) if isinstance(error, CompatError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self._take_back()
            self.state, self.reason = "failed", text
        if self.route in EXPLICIT:
            if isinstance(error, CompatError):
                raise error
            raise PatchError(f"{self.consumer}: {text}") from error
        self._unwatch()
        say(logging.WARNING, f"{self.consumer} is left unpatched: {short or text}")

    def _take_back(self) -> None:
        left = patching.undo(self._records)
        names = [f"{each.patch}: {each.target} (changed by somebody else since)" for each in left]
        for each in self._records:
            if each not in left:
                ledger.forget(each.patch, str(each.target))
        self._records = left
        for loans in self._loans.values():
            for patch, target in loans:
                ledger.forget(patch, target.name)
        self.left = tuple(names)

    def _unwatch(self) -> None:
        found: Finder = finder()
        for name in [name for name, call in found.watched.items() if call == self.imported]:
            del found.watched[name]
            found.lending.pop(name, None)

    def undo(self) -> tuple[str, ...]:
        """Takes everything back; later imports are not patched. Returns what could not be taken back."""
        with self._lock:
            finder().routes.pop(self.consumer, None)
            self._unwatch()
            self._take_back()
            self.state, self.reason, self.route, self.plan = "idle", None, None, None
            return self.left

    def missing(self) -> list[str]:
        """Targets in imported modules that are not in place, while awake."""
        there = {(each.patch, str(each.target)) for each in patching.alive(self._records)}
        return [
            f"{patch}: {target}"
            for name, targets in self._targets.items()
            for patch, target in targets
            if name in sys.modules and (patch, str(target)) not in there
        ]
