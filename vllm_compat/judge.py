"""How a plan is made: what is installed, which patches are for it, whether its source has the right shape.

Problems stop everything, warnings stop nothing; with VLLM_COMPAT_STRICT=1 warnings, disabled patches and
releases without real runs are problems too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence

from packaging.version import Version

from vllm_compat.decisions import Decision, Found, Plan
from vllm_compat.errors import PlanError
from vllm_compat.registry import Package, Patch, PatchSet
from vllm_compat.shapes import check
from vllm_compat.source import Sources
from vllm_compat.switches import Switches, read
from vllm_compat.versions import installed, matches, release_of

Releases = Mapping[str, "Version | None"]  # package module -> release, None where it is not known


def decide(
    patch_set: PatchSet,
    *,
    target: str | os.PathLike[str] | None = None,
    switches: Switches | None = None,
    known: Iterable[str] = (),
) -> Plan:
    """The plan for one (checked) patch set. `known`: all patch ids that VLLM_COMPAT_DISABLE may name."""
    given = switches or read()
    path = None if target is None else [os.fspath(target)]
    sources = Sources(path)
    packages = tuple(_look(package, path, sources) for package in patch_set.packages)
    releases: Releases = {each.module: Version(each.release) if each.release else None for each in packages}
    problems = [each.problem for each in packages if each.problem] + _known_bad(patch_set, packages, releases)
    warnings = [
        f"{each.module} {each.version} is newer than {package.newest}, the newest release known here; "
        "trying, because the shapes of its source are checked"
        for each, package in zip(packages, patch_set.packages, strict=True)
        if each.status == "newer"
    ]
    problems += _unknown_ids(given.disabled, {*known, *(patch.id for patch in patch_set.patches)})
    decisions: dict[str, Decision] = {}
    for patch in patch_set.patches:
        decision = _decide(patch, given.disabled, releases, sources, decisions)
        decisions[patch.id] = decision
        if decision.status in ("misfit", "blocked"):
            problems.append(f"{patch.id}: {'; '.join(decision.details) or decision.reason}")
    if given.strict:
        problems += [f"{text} (VLLM_COMPAT_STRICT)" for text in warnings]
        problems += [
            f"{each.patch_id} is left out by VLLM_COMPAT_DISABLE (VLLM_COMPAT_STRICT)"
            for each in decisions.values()
            if each.status == "disabled"
        ]
        problems += [
            f"{each.module} {each.version} is supported, but no real run has proven it (VLLM_COMPAT_STRICT)"
            for each in packages
            if each.status == "not-proven"
        ]
        warnings = []
    return Plan(
        name=patch_set.name,
        packages=packages,
        decisions=tuple(decisions.values()),
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _look(package: Package, path: Sequence[str] | None, sources: Sources) -> Found:
    version, release, status, problem = installed(package, path), None, "ok", None
    looked = f"{package.module} (distribution {' or '.join(package.distributions)})"
    if version is None:
        status, problem = "missing", f"{looked} is not installed"
        if there := sources.roots(package.module):
            problem = f"{looked} has no package metadata, only source in {there[0]}: install it with pip"
    else:
        try:
            release = release_of(version)
        except PlanError as error:
            status, problem = "unreadable", f"{package.module} {error}"
        else:
            status = _standing(package, release)
            if status == "unsupported":
                problem = f"{package.module} {version} is not supported, only {package.supported}"
    return Found(
        module=package.module,
        distributions=package.distributions,
        version=version,
        release=None if release is None else str(release),
        supported=package.supported,
        status=status,
        problem=problem,
    )


def _known_bad(patch_set: PatchSet, packages: Iterable[Found], releases: Releases) -> list[str]:
    versions = {each.module: each.version for each in packages}
    texts = []
    for bad in patch_set.known_bad:
        found = {module: releases[module] for module in bad.ranges}
        if all(release is not None and matches(release, bad.ranges[module]) for module, release in found.items()):
            pair = " with ".join(f"{module} {versions[module]}" for module in found)
            texts.append(f"{pair}: {bad.symptom}; {bad.advice}")
    return texts


def _standing(package: Package, release: Version) -> str:
    if not matches(release, package.supported):
        return "unsupported"
    if package.newest is not None and release > Version(package.newest):
        return "newer"
    if package.proven and release not in map(Version, package.proven):
        return "not-proven"
    return "ok"


def _unknown_ids(disabled: Iterable[str], known: set[str]) -> list[str]:
    texts = []
    for name in disabled:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`vllm-compat list` shows the known ones"
            texts.append(f"VLLM_COMPAT_DISABLE names {name!r}, which is no patch: {hint}")
    return texts


def _decide(
    patch: Patch,
    disabled: Sequence[str],
    releases: Releases,
    sources: Sources,
    before: Mapping[str, Decision],
) -> Decision:
    fits = []
    for module, specifier in patch.ranges.items():
        release = releases[module]
        if release is None:
            return Decision(patch.id, "not-needed", f"the release of {module} is not known")
        if not matches(release, specifier):
            return Decision(patch.id, "not-needed", f"{module} {release} is not in {specifier}")
        fits.append(f"{module} {release} is in {specifier or 'any release'}")
    if patch.id in disabled:
        return Decision(patch.id, "disabled", "VLLM_COMPAT_DISABLE")
    for other in patch.needs:
        if before[other].status != "apply":
            reason = f"needs {other}, which does not apply ({before[other].status}: {before[other].reason})"
            return Decision(patch.id, "blocked", reason)
    shapes = [shape for shape in patch.shapes if shape.is_asked(releases.get(shape.package))]
    misfits = tuple(str(misfit) for shape in shapes if (misfit := check(shape, sources)))
    if misfits:
        reason = f"{len(misfits)} of {len(shapes)} shapes do not fit"
        return Decision(patch.id, "misfit", reason, misfits)
    return Decision(patch.id, "apply", "; ".join(fits) or "always")
