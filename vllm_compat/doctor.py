"""Preflight: the plan, the routes, what packages demand of each other, and the checks that patch sets bring.

Imports neither consumer nor runtime. Problems are what will stop an extraction, warnings what may.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from vllm_compat import __version__
from vllm_compat.decisions import Plan, columns
from vllm_compat.discovery import entry_points
from vllm_compat.judge import decide
from vllm_compat.questions import surroundings
from vllm_compat.registry import Finding, PatchSet, discover
from vllm_compat.routes import Route, routes
from vllm_compat.versions import matches, ranges

AMBIENT = ("startup", "sitecustomize")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    plans: tuple[Plan, ...]
    routes: tuple[Route, ...]
    findings: tuple[tuple[str, Finding], ...]  # name of the check, what it found
    target: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        bad = any(finding.status == "problem" for _, finding in self.findings)
        return bool(self.plans) and all(plan.ok for plan in self.plans) and not bad

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "version": __version__,
            "target": self.target,
            "python": {
                "version": platform.python_version(),
                "implementation": platform.python_implementation(),
                "executable": sys.executable,
                "prefix": sys.prefix,
            },
            "platform": {"system": platform.system(), "machine": platform.machine(), "libc": _libc()},
            "plans": [plan.as_dict() for plan in self.plans],
            "routes": [route.as_dict() for route in self.routes],
            "findings": [{"check": name, **asdict(finding)} for name, finding in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        lives = {True: "live", False: "not live", None: "not known"}
        rows = [(lives[route.live], route.route, route.text) for route in self.routes]
        parts = [plan.as_text() for plan in self.plans] or ["no patches are installed"]
        parts += ["routes:\n" + columns(rows)]
        parts += ["checks:\n" + "\n".join(_lines(self.findings))]
        good = "ready" if self.ok else "not ready"
        return "\n\n".join([*parts, f"{good} (asked in {self.seconds * 1000:.0f} ms, nothing imported)"])


def _lines(findings: Iterable[tuple[str, Finding]]) -> Iterator[str]:
    for name, finding in findings:
        yield f"  {finding.status:8}  {name}: {finding.text}"
        if finding.advice:
            yield f"            {finding.advice}"


def diagnose(*, target: Path | None = None, options: Mapping[str, Any] | None = None) -> Diagnosis:
    """Looks at everything. `options`: what `vllm-compat doctor` was given, by name."""
    begin = time.perf_counter()
    sets = discover()
    known = [patch.id for each in sets for patch in each.patches]
    plans = tuple(decide(each, target=target, known=known) for each in sets)
    ways = routes(target)
    findings = [("python", _python()), ("install", _install(target)), ("routes", _active(ways, target))]
    for patch_set, plan in zip(sets, plans, strict=True):
        findings += _of_set(patch_set, plan, target, options or {})
    return Diagnosis(
        plans=plans,
        routes=ways,
        findings=tuple(findings),
        target=None if target is None else str(target),
        seconds=time.perf_counter() - begin,
    )


def _of_set(
    patch_set: PatchSet, plan: Plan, target: Path | None, options: Mapping[str, Any]
) -> Iterator[tuple[str, Finding]]:
    for finding in _pins(plan, target):
        yield "packages", finding
    given = {**{option.name: option.default for option in patch_set.options}, **options}
    here = surroundings(plan, target, given)
    for check in patch_set.checks:
        try:
            for finding in check.run(here):
                yield check.name, finding
        except Exception as error:  # noqa: BLE001  # one that fails says nothing about the others
            text = f"could not be checked: {type(error).__name__}: {error}"
            yield check.name, Finding(status="warning", text=text)


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    wanted = metadata.metadata("vllm-compat")["Requires-Python"] if _installed() else None
    if wanted and not ranges(wanted).contains(platform.python_version(), prereleases=True):
        return Finding(status="problem", text=f"{text}; vllm_compat needs Python {wanted}")
    return Finding(status="ok", text=f"{text}, {_libc() or 'libc not known'}")


def _installed() -> bool:
    return any(entry.distribution == "vllm-compat" for entry in entry_points())


def _install(target: Path | None) -> Finding:
    """One package, in one place."""
    here = Path(__file__).resolve().parent
    if target is not None:
        there = target / "vllm_compat" / "__init__.py"
        return Finding(status="ok" if there.is_file() else "note", text=f"judged by {here}, for {target}")
    if (found := next(iter(metadata.distributions(name="vllm-compat")), None)) is None:
        return Finding(status="problem", text=f"{here} is not installed", advice="install it with pip")
    if found.version != __version__:
        text = f"the metadata says {found.version}, the files in {here} are {__version__}"
        return Finding(status="problem", text=text, advice="two installations are mixed: uninstall, and install again")
    for text in _requirements(found):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            other = next(iter(metadata.distributions(name=wanted.name)), None)
            if other is None or not wanted.specifier.contains(other.version, prereleases=True):
                version = "none" if other is None else other.version
                text = f"vllm_compat needs {wanted}, {version} is installed"
                return Finding(status="problem", text=text, advice="install it with pip")
    return Finding(status="ok", text=f"vllm_compat {__version__} in {here}")


def _active(ways: Iterable[Route], target: Path | None) -> Finding:
    live = [way.route for way in ways if way.route in AMBIENT and way.live]
    if live:
        return Finding(status="ok", text=f"an unmodified script is patched ({', '.join(live)})")
    return Finding(
        status="note" if target is not None else "warning",
        text="an unmodified script is not patched here",
        advice="start it with `vllm-compat run`, or `import vllm_compat` before the consumer",
    )


def _pins(plan: Plan, target: Path | None) -> Iterator[Finding]:
    """What the packages' own metadata demands of each other. A local label (+cpu, +cu129) is the same release."""
    path = sys.path if target is None else [str(target)]
    names = {_normal(name): each for each in plan.packages for name in each.distributions}
    found = {
        each.module: distribution
        for each in plan.packages
        for name in reversed(each.distributions)
        for distribution in metadata.distributions(name=name, path=path)
    }
    fine = True
    for module, distribution in found.items():
        for text in _requirements(distribution):
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            other = names.get(_normal(wanted.name))
            if other is None or other.release is None or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            specifier = re.sub(r"\+[^,]*", "", str(wanted.specifier))
            if not matches(Version(other.release), specifier):
                fine = False
                yield Finding(
                    status="warning",
                    text=f"{module} {distribution.version} wants {wanted.name}{wanted.specifier}, "
                    f"{other.version} is installed",
                    advice="install all of them in one command, so that the installer finds releases that agree",
                )
    if fine and found:
        yield Finding(status="ok", text="what the packages demand of each other is met")


def _requirements(distribution: metadata.Distribution) -> list[str]:
    """From the header lines only: `distribution.requires` parses the whole file, long descriptions and all."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    head = text.partition("\n\n")[0]
    return re.findall(r"^Requires-Dist:\s*(.*)$", head, re.MULTILINE)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return ""
