"""What the start-up hook does when a consumer, or a module with targets, is imported; loaded at that moment."""

from __future__ import annotations

import sys
from _thread import get_ident

from _vllm_compat_startup import EXPLICIT, Finder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def find_spec(
    ours: Finder, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Finds nothing itself: it lets the others find and goes along with what they load."""
    key = (name, get_ident())
    if key in ours.searching:
        return None
    ours.searching.add(key)
    try:
        for other in [each for each in sys.meta_path if each is not ours and hasattr(each, "find_spec")]:
            spec = other.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
    finally:
        ours.searching.discard(key)
    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, Loader):
        spec.loader = Loader(spec.loader, ours)  # type: ignore[assignment]
    return spec


def wake(ours: Finder, name: str) -> None:
    """Right before the module is made."""
    route = ours.routes.get(name)
    if route is None:
        return
    ambient = route not in EXPLICIT
    try:
        if ambient:
            ours.waking.add(get_ident())
        try:
            from vllm_compat.activation import wake
        finally:
            ours.waking.discard(get_ident())
        wake(name, route)
    except Exception as error:
        if not ambient:
            raise  # still armed: the next try to import it is refused too
        _warn(f"vllm_compat: {name} is left unpatched: {type(error).__name__}: {error}")
    if ours.routes.get(name) == route:
        del ours.routes[name]


class Loader:
    """Stands before a module's own loader until the module has been executed, then leaves no trace in it."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        wake(self._finder, spec.name)
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        lend = self._finder.lending.get(module.__name__)
        take_back = lend(module.__name__) if lend is not None else None
        try:
            self._loader.exec_module(module)
        finally:
            if take_back is not None:
                take_back()
        after = self._finder.watched.get(module.__name__)
        if after is not None:
            after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _warn(text: str) -> None:
    try:
        if sys.stderr is not None:  # print would take stdout instead
            print(" ".join(text.split()), file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001  # no usable stderr; nothing of ours may break a process
        pass
