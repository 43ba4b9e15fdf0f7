"""The import hook that wakes vllm_compat. Every route uses it; in a Python start it is all that is loaded of us.

A package of its own, because Python's start-up files (which lie here, and are installed at the root of site-packages)
and the entry points of plugins can only name something to import, and importing vllm_compat means asking for patches.
It imports nothing that a bare Python start has not imported already (not even `__future__`), and reads no environment
variable: a Python that never imports a consumer pays for this file and for one dictionary look-up per import. The
engine is imported when a consumer is. Looking for a consumer (`importlib.util.find_spec`) wakes nothing, only importing
it does. Copies of this file share one finder, so any number of routes is the same as one; a route that a person took
outranks one that was just there.

It knows no consumer by name: who calls it says the name, as `arm(["consumer"], "pth")`, or, where only the name of a
function can be given, as `start_consumer` or `plugin_consumer`.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

EXPLICIT = ("import", "explicit", "run")  # routes that a person took: errors are raised. Others only warn.
_BY_NAME = ("start", "plugin")  # routes by a function's name


def arm(names: "Iterable[str]", route: str) -> "Finder":
    """Waits for these top-level packages; the first import of one wakes the engine.

    A route that nobody asked for does not undo `deactivate()`.
    """
    found = finder()
    found.note(route)
    if route in EXPLICIT:
        found.declined = False
    for name in names:
        if found.routes.get(name) not in EXPLICIT and not found.declined:
            found.routes[name] = route
    return found


def __getattr__(name: str) -> "Callable[[], None]":
    """`ROUTE_CONSUMER`: a function without arguments that arms for this consumer by this route."""
    route, _, consumer = name.partition("_")
    if route not in _BY_NAME or not consumer:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def by_name() -> None:
        arm([consumer], route)

    return by_name


def finder() -> "Finder":
    """The one finder of this process, first on sys.meta_path."""
    for each in sys.meta_path:
        if getattr(each, "is_vllm_compat", False):
            found: Any = each  # perhaps of another copy of this file
            return found  # type: ignore[no-any-return]
    new = Finder()
    sys.meta_path.insert(0, new)
    return new


class Finder:
    """Finds nothing itself: it lets the others find and goes along with what they load."""

    is_vllm_compat = True

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}  # consumer -> route, until it has been imported
        self.watched: dict[str, Callable[[ModuleType], None]] = {}  # module -> called after each execution
        self.waking: set[int] = set()  # threads that import the engine for an ambient route
        self.declined = False  # somebody has called deactivate()
        self.taken: list[tuple[str, int]] = []  # routes by which we came here, with the process they were taken in
        self._searching: set[tuple[str, int]] = set()

    def note(self, route: str) -> None:
        if (route, os.getpid()) not in self.taken:
            self.taken.append((route, os.getpid()))

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        key = (name, get_ident())
        if (name not in self.routes and name not in self.watched) or key in self._searching:
            return None
        self._searching.add(key)
        try:
            for other in [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]:
                spec = other.find_spec(name, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._searching.discard(key)
        if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, Loader):
            spec.loader = Loader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def wake(self, name: str) -> None:
        """Right before the module is made."""
        route = self.routes.get(name)
        if route is None:
            return
        ambient = route not in EXPLICIT
        try:
            if ambient:
                self.waking.add(get_ident())
            try:
                from vllm_compat.activation import wake
            finally:
                self.waking.discard(get_ident())
            wake(name, route)
        except Exception as error:
            if not ambient:
                raise  # still armed: the next try to import it is refused too
            _warn(f"vllm_compat: {name} is left unpatched: {type(error).__name__}: {error}")
        if self.routes.get(name) == route:
            del self.routes[name]


class Loader:
    """Stands before a module's own loader until the module has been executed, then leaves no trace in it."""

    def __init__(self, loader: "Any", finder: Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        self._finder.wake(spec.name)
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        after = self._finder.watched.get(module.__name__)
        if after is not None:
            after(module)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _warn(text: str) -> None:
    try:
        print(" ".join(text.split()), file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001  # no usable stderr; nothing of ours may break a process
        pass
