"""Which release is installed, from package metadata alone (nothing is imported), and which ranges it is in.

Ranges speak about releases, so every version is first reduced to the release its code belongs to:

    installed                          counts as   why
    0.16.0                             0.16.0      a release
    0.16.0rc2                          0.16.0      a candidate is the release in all but name
    0.16.0rc2.dev87+g0b20469c6         0.16.0      a nightly on the way to 0.16.0
    0.17.1.dev3+gabc                   0.17.1      setuptools-scm counts up: it is on the way to 0.17.1
    0.11.0.post2                       0.11.0      a repaired upload of the same code
    0.16.0+cu129, 0.16.0+cpu           0.16.0      a local build of the same code
    1!0.16.0                           0.16.0      epochs order package indexes, they say nothing about code
    0.1.dev1+gabc, dev, 0+unknown      an error    built from source without tags: it names no release
    not a version                      an error

A range is then asked about that plain release only. This is also what makes the answer independent of the
`packaging` release: those differ in how a specifier treats pre-releases, dev builds and local versions, and
agree about final releases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_compat.errors import PlanError

if TYPE_CHECKING:
    from vllm_compat.registry import Package

_FIRST_RELEASE = Version("0.2")  # below it a dev build is setuptools-scm's answer to a checkout without tags


def release_of(text: str) -> Version:
    """The release that a version belongs to (table above).

    Raises PlanError when the text names none; the text of the error continues "<package> reports ...".
    """
    hint = "rebuild it with its git tags, or with SETUPTOOLS_SCM_PRETEND_VERSION=<its release>"
    try:
        version = Version(text)
    except InvalidVersion:
        raise PlanError(f"reports {text!r}, which is no version: {hint}") from None
    release = Version(".".join(map(str, version.release)))
    if (version.is_devrelease or version.local is not None) and release < _FIRST_RELEASE:
        raise PlanError(f"reports {text!r}, a source build without tags, which says no release: {hint}")
    return release


def installed(package: Package, path: Sequence[str] | None = None) -> str | None:
    """The version in the metadata of the first of the package's distributions that is installed, else None.

    `path` is a list of site-packages folders to look in instead of this process's own sys.path.
    """
    where = sys.path if path is None else list(path)
    for name in package.distributions:
        for distribution in metadata.distributions(name=name, path=where):
            version = _version(distribution)
            if version:  # a half-removed install has none
                return version
    return None


def _version(distribution: metadata.Distribution) -> str | None:
    """From the header lines only: `distribution.version` parses the whole file, long descriptions and all."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.lower() == "version":
            return value.strip()
        if not line:
            break
    return None


@cache
def ranges(specifier: str) -> SpecifierSet:
    """A parsed range; PlanError if it does not parse."""
    try:
        return SpecifierSet(specifier)
    except InvalidSpecifier:
        raise PlanError(f"{specifier!r} is no version range (PEP 440, such as '>=0.11.1,<0.17')") from None


def matches(release: Version, specifier: str) -> bool:
    """Whether a release (as given by release_of) is in a range; the empty range takes every release."""
    return ranges(specifier).contains(release, prereleases=True)
