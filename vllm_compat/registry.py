"""What a patch is, before it is code: records, how they are found, put in order and checked.

A package brings patches for one consumer by an entry point in the group `vllm_compat.patches`. Its name is
the consumer's top-level module, its object a `PatchSet`:

    [project.entry-points."vllm_compat.patches"]
    consumer = "my_package.patches:SET"

Records are checked when they are loaded: a wrong one is an error where it is written, not where it bites.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from packaging.version import Version

from vllm_compat.discovery import GROUP, EntryPoint, entry_points
from vllm_compat.errors import PlanError
from vllm_compat.versions import matches, ranges

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A fact about installed source that a patch builds on; checked with `ast`, never by import."""

    module: str
    symbol: str  # "Class", "Class.method", "function", or a name bound or imported at module level
    parameters: tuple[str, ...] = ()  # function, method: these parameters exist
    absent: tuple[str, ...] = ()  # ... and these do not
    fields: tuple[str, ...] = ()  # class: these names are bound or annotated in the class body
    releases: str = ""  # of the module's package: a range outside which the fact is not asked

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def is_asked(self, release: Version | None) -> bool:
        """Whether this is a fact about that release of the package; None, where it is not known, is every release."""
        return release is None or matches(release, self.releases)


@dataclass(frozen=True, kw_only=True)
class Rebind:
    """Target: one binding in a module of the consumer."""

    module: str
    name: str  # dotted for a class attribute: "Generator.generate"
    make: Callable[[Any], Any]  # current binding -> replacement; called when the module has been imported

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Lend:
    """Target: what a module of the consumer finds while it is imported; taken back right after, also if that fails.

    For a name that the consumer imports from a package that no longer has it. Where the module is imported already
    there is nothing left to lend for.
    """

    module: str  # of the consumer
    name: str  # what is lent, for people
    do: Callable[[], Undo]  # lends it and returns its undo

    def __str__(self) -> str:
        return self.name


Target = Rebind | Lend


@dataclass(frozen=True, kw_only=True)
class Retirement:
    """When a patch can go: in words, and as data a test can evaluate (`package` matches `release`)."""

    when: str
    package: str | None = None
    release: str | None = None


@dataclass(frozen=True, kw_only=True)
class Patch:
    id: str
    ranges: Mapping[str, str]  # package module -> PEP 440 range; every one must match
    targets: tuple[Target, ...]
    shapes: tuple[Shape, ...] = ()
    symptom: str  # the error text or the wrong result a user sees without it
    cause: str  # the upstream change
    does: str
    retires: Retirement
    evidence: str
    after: tuple[str, ...] = ()  # order only
    needs: tuple[str, ...] = ()  # these must apply too, else this one is an error


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package that matters: where its version is read and which releases are supported."""

    module: str
    distributions: tuple[str, ...]  # tried in order for the version
    supported: str  # range; "" takes any release
    newest: str | None = None  # newest release known: above it warn (strict: error)
    proven: tuple[str, ...] = ()  # releases with real runs; another supported one is "not proven"


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Releases that do not work (together), whatever is patched: a problem of the plan that says why."""

    ranges: Mapping[str, str]  # package module -> PEP 440 range; bad where every one matches
    symptom: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found. `status`: ok, note, warning or problem."""

    status: str
    text: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a check may look at, beside the machine itself."""

    environ: Mapping[str, str]
    versions: Mapping[str, str | None]  # package module -> version as installed
    options: Mapping[str, Any]  # of `vllm-compat doctor`, by the names of the set's options
    path: tuple[str, ...]  # where the packages are: sys.path, or the site-packages folder that is judged


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something about the machine that this patch set's consumer will need. Imports neither consumer nor runtime."""

    name: str
    run: Callable[[Surroundings], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of `vllm-compat doctor` that checks read."""

    name: str  # "batch-size"
    default: int | str | None
    help: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a patch set says of something of the user's. A finding that is a problem makes it a no."""

    facts: Mapping[str, Any]  # plain data, in the order in which people read it
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """An option of `vllm-compat plan` that has an answer. Its code imports neither consumer nor runtime."""

    name: str  # "model"
    metavar: str
    help: str
    answer: Callable[[Surroundings], Answer]  # what was given is in `options[name]`


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    name: str
    consumer: Package
    runtimes: tuple[Package, ...]
    patches: tuple[Patch, ...]
    known_bad: tuple[KnownBad, ...] = ()
    checks: tuple[Check, ...] = ()
    options: tuple[Option, ...] = ()
    questions: tuple[Question, ...] = ()

    @property
    def packages(self) -> tuple[Package, ...]:
        return (self.consumer, *self.runtimes)


def discover() -> tuple[PatchSet, ...]:
    """Every installed patch set, checked, its patches in the order in which they apply."""
    sets = tuple(_load(entry) for entry in entry_points())
    _unique((patch.id for each in sets for patch in each.patches), "patch id", "all patch sets")
    return sets


def load(consumer: str) -> PatchSet:
    """The patch set for one consumer; others, even broken ones, are not touched."""
    for entry in entry_points():
        if entry.name == consumer:
            return _load(entry)
    raise PlanError(f"no installed package brings patches for {consumer} (entry-point group {GROUP})")


def _load(entry: EntryPoint) -> PatchSet:
    where = f"entry point {entry.name} = {entry.value} of {entry.distribution}"
    module, _, name = entry.value.partition(":")
    try:
        found = getattr(import_module(module.strip()), name.strip())
    except Exception as error:
        cause = _hidden_by_source(module.strip(), error) or f"{type(error).__name__}: {error}"
        raise PlanError(f"{where} cannot be loaded: {cause}") from error
    if not isinstance(found, PatchSet):
        raise PlanError(f"{where} is a {type(found).__name__}, expected a vllm_compat.registry.PatchSet")
    if found.consumer.module != entry.name:
        raise PlanError(f"{where} is for the consumer {found.consumer.module}; both must have one name")
    return checked(found)


def _hidden_by_source(module: str, error: Exception) -> str | None:
    """The trap of a Python started in the checkout: its `vllm_compat` is found before the installed one."""
    if not (isinstance(error, ModuleNotFoundError) and error.name == module and module.startswith("vllm_compat.")):
        return None
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (
        f"vllm_compat was imported from {folder}, a source tree, where {module} does not exist: only installing makes "
        "it. The tree hides the installed package. Start Python in another folder, or so that the current folder is "
        "not searched: a command such as `pytest` instead of `python -m pytest`, or `python -P`"
    )


def checked(patch_set: PatchSet) -> PatchSet:
    """The patch set with its patches in order; PlanError, naming the patch, if a record is wrong."""
    _unique((package.module for package in patch_set.packages), "package", patch_set.name)
    _unique((patch.id for patch in patch_set.patches), "patch id", patch_set.name)
    for package in patch_set.packages:
        ranges(package.supported)
    modules = {package.module for package in patch_set.packages}
    for patch in patch_set.patches:
        for module, specifier in patch.ranges.items():
            if module not in modules:
                raise PlanError(f"{patch.id}: range for {module}, which is no package of {patch_set.name}")
            ranges(specifier)
        for shape in patch.shapes:
            ranges(shape.releases)
            if shape.releases and shape.package not in modules:
                raise PlanError(f"{patch.id}: releases of {shape.package}, which is no package of {patch_set.name}")
        for target in patch.targets:
            if target.module.partition(".")[0] != patch_set.consumer.module:
                consumer = patch_set.consumer.module
                what = target if isinstance(target, Rebind) else f"{target.module}, for which {target} is lent,"
                raise PlanError(f"{patch.id}: {what} is not in {consumer}; only the consumer is patched")
    for bad in patch_set.known_bad:
        for module, specifier in bad.ranges.items():
            if module not in modules:
                raise PlanError(f"known-bad range for {module}, which is no package of {patch_set.name}")
            ranges(specifier)
    patches, earlier = _ordered(patch_set.patches)
    _check_conflicts(patches, earlier)
    return replace(patch_set, patches=patches)


def _unique(names: Iterable[str], what: str, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{what} {name!r} is there twice in {where}")
        seen.add(name)


def _ordered(patches: tuple[Patch, ...]) -> tuple[tuple[Patch, ...], dict[str, frozenset[str]]]:
    """The patches in order, ties as written; and for each id all ids that come before it by declaration."""
    known = {patch.id for patch in patches}
    for patch in patches:
        for other in (*patch.after, *patch.needs):
            if other not in known:
                raise PlanError(f"{patch.id}: comes after or needs {other!r}, which is no known patch")
    earlier: dict[str, frozenset[str]] = {}
    done: list[Patch] = []
    left = list(patches)
    while left:
        for patch in left:
            direct = {*patch.after, *patch.needs}
            if direct <= earlier.keys():
                break
        else:
            raise PlanError(f"these patches wait for each other: {', '.join(patch.id for patch in left)}")
        earlier[patch.id] = frozenset(direct).union(*(earlier[other] for other in direct))
        done.append(patch)
        left.remove(patch)
    return tuple(done), earlier


def _check_conflicts(patches: tuple[Patch, ...], earlier: dict[str, frozenset[str]]) -> None:
    """Two patches may change one binding (or a class and its attribute) only in a declared order."""
    seen: list[tuple[str, Patch]] = []
    for patch in patches:
        for target in (target for target in patch.targets if isinstance(target, Rebind)):
            path = str(target)
            for other_path, other in seen:
                same = path == other_path
                if same and other is patch:
                    raise PlanError(f"{patch.id}: {path} is there twice")
                inside = path.startswith(other_path + ".") or other_path.startswith(path + ".")
                if (same or inside) and other is not patch and other.id not in earlier[patch.id]:
                    raise PlanError(f"{patch.id} and {other.id} both change {path}: say which comes first with `after`")
            seen.append((path, patch))
