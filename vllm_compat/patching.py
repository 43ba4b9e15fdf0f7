"""Changes bindings, all or nothing, and changes them back by identity.

First original wins: a binding that still leads to our replacement, directly or under wrappers that others
have put on top, is in place and is not changed again. Undo puts back exactly the object that was there; a
binding that somebody else has changed since is left alone and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_compat.errors import PatchError
from vllm_compat.registry import Rebind

_MISSING = object()


@dataclass(frozen=True, eq=False)
class Record:
    """One change that was made. `original` is the raw entry of the owner's __dict__, missing if inherited."""

    patch: str
    target: Rebind
    owner: Any  # module or class
    original: Any
    replacement: Any

    @property
    def name(self) -> str:
        return self.target.name.rpartition(".")[2]

    @property
    def in_place(self) -> bool:
        """Whether the binding still leads to the replacement."""
        current = vars(self.owner).get(self.name, _MISSING)
        for _ in range(100):  # wrappers that wrap each other in a circle end here
            if current is self.replacement:
                return True
            current = getattr(current, "__wrapped__", _MISSING)
            if current is _MISSING:
                return False
        return False


def apply(module: ModuleType, targets: Sequence[tuple[str, Rebind]], before: Sequence[Record]) -> list[Record]:
    """Applies (patch id, target) pairs to an imported module and returns the new records.

    `before` are records of earlier changes; what is still in place is not changed again. If anything fails,
    what was changed here is changed back and PatchError names patch, target and cause.
    """
    standing = set()
    for patch, target in targets:
        owner = _owner(module, patch, target)
        same = (each for each in alive(before) if (each.patch, each.target) == (patch, target))
        if any(each.owner is owner for each in same):
            standing.add((patch, target))
    done: list[Record] = []
    for patch, target in targets:
        if (patch, target) in standing:
            continue
        try:
            done.append(_change(_owner(module, patch, target), patch, target))
        except Exception as error:
            undo(done)
            if isinstance(error, PatchError):
                raise
            cause = f"{type(error).__name__}: {error}"
            raise PatchError(f"{patch}: {target} could not be replaced: {cause}") from error
    return done


def alive(records: Iterable[Record]) -> list[Record]:
    """Records in place; of several on one binding the last speaks for all, each wraps the one before."""
    last = {(id(each.owner), each.name): each for each in records}
    return [each for each in records if last[id(each.owner), each.name].in_place]


def _owner(module: ModuleType, patch: str, target: Rebind) -> Any:
    """The module or class that holds the binding; PatchError if it or the binding is not there."""
    *path, name = target.name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, name):
        raise PatchError(f"{patch}: {target} does not exist in the imported module {module.__name__}")
    return owner


def _change(owner: Any, patch: str, target: Rebind) -> Record:
    name = target.name.rpartition(".")[2]
    original = vars(owner).get(name, _MISSING)
    # The raw entry, so that a maker sees (and can return) a staticmethod or property as what it is.
    replacement = target.make(getattr(owner, name) if original is _MISSING else original)
    setattr(owner, name, replacement)
    return Record(patch, target, owner, original, replacement)


def undo(records: Sequence[Record]) -> list[Record]:
    """Changes back, last first; returns the records whose binding somebody else has changed since."""
    left = []
    for record in reversed(records):
        if vars(record.owner).get(record.name, _MISSING) is not record.replacement:
            left.append(record)
        elif record.original is _MISSING:
            delattr(record.owner, record.name)
        else:
            setattr(record.owner, record.name, record.original)
    return left[::-1]
