"""The import hook that wakes vllm_compat. Every route uses it; in a Python start it is all that is loaded of us.

A package of its own, because Python's start-up files (which lie here, and are installed at the root of site-packages)
and the entry points of plugins can only name something to import, and importing vllm_compat means asking for patches.
It imports nothing that a bare Python start has not imported already (not even `__future__`), and reads no environment
variable: a Python that never imports a consumer pays for this file and for one dictionary look-up per import. The
engine is imported when a consumer is. Looking for a consumer (`importlib.util.find_spec`) wakes nothing, only importing
it does. Copies of this file share one finder, so any number of routes is the same as one; a route that a person took
outranks one that was just there.

It knows no consumer by name: who calls it says the name, as `arm(["consumer"], "pth")`, or, where only the name of a
function can be given, as `start_consumer` or `plugin_consumer`. Short, because where no bytecode is kept every start
compiles it; the rest is in `hook.py`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

EXPLICIT = ("import", "explicit", "run")  # routes that a person took: errors are raised. Others only warn.


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
    """`start_CONSUMER`, `plugin_CONSUMER`: a function without arguments that arms for this consumer by this route."""
    route, _, consumer = name.partition("_")
    if route in ("start", "plugin") and consumer:

        def by_name() -> None:
            arm([consumer], route)

        return by_name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def finder() -> "Finder":
    """The one finder of this process, first on sys.meta_path; perhaps of another copy of this file."""
    for each in sys.meta_path:
        if getattr(each, "is_vllm_compat", False):
            return each  # type: ignore[return-value]
    new = Finder()
    sys.meta_path.insert(0, new)
    return new


class Finder:
    is_vllm_compat = True

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}  # consumer -> route, until it has been imported
        self.watched: dict[str, Callable[[ModuleType], None]] = {}  # module -> called after each execution
        self.lending: dict[str, Callable[[str], Callable[[], None]]] = {}  # watched module -> called around each one
        self.waking: set[int] = set()  # threads that import the engine for an ambient route
        self.searching: set[tuple[str, int]] = set()  # modules and threads: who is asking the other finders
        self.declined = False  # somebody has called deactivate()
        self.taken: list[tuple[str, int]] = []  # routes by which we came here, with the process they were taken in

    def note(self, route: str) -> None:
        if (route, os.getpid()) not in self.taken:
            self.taken.append((route, os.getpid()))

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self.routes and name not in self.watched:
            return None
        try:
            from _vllm_compat_startup.hook import find_spec
        except Exception as error:
            if "vllm_compat" in sys.modules:  # somebody has asked for patches
                raise
            self.routes.clear()
            if sys.stderr is not None:
                print(f"vllm_compat: {name} is left unpatched: {error}", file=sys.stderr)
            return None
        return find_spec(self, name, path, target)
