"""What versions mean; the answers may not depend on the `packaging` release."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from vllm_compat.errors import PlanError
from vllm_compat.registry import Package
from vllm_compat.versions import installed, matches, release_of


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.16.0", "0.16.0"),
        ("0.16", "0.16.0"),
        ("0.16.0rc2", "0.16.0"),
        ("0.16.0rc2.dev87+g0b20469c6", "0.16.0"),
        ("0.17.1.dev3+gabc", "0.17.1"),
        ("0.11.0.post2", "0.11.0"),
        ("0.11.2.post1.dev4+gabc.d20251120", "0.11.2"),
        ("0.16.0+cu129", "0.16.0"),
        ("0.16.0+cpu", "0.16.0"),
        ("1!0.16.0a1", "0.16.0"),
        ("v0.16.0", "0.16.0"),
        ("2.10.0a0+git1234", "2.10.0"),
    ],
)
def test_release_of(text: str, release: str) -> None:
    found = release_of(text)
    assert found == Version(release)
    assert not found.is_prerelease
    assert found.local is None


@pytest.mark.parametrize("text", ["0.1.dev1+g0b20469c6", "0.1.dev9876", "0+unknown", "0.0.0+local"])
def test_source_build_without_tags(text: str) -> None:
    with pytest.raises(PlanError, match=r"without tags.*SETUPTOOLS_SCM_PRETEND_VERSION"):
        release_of(text)


@pytest.mark.parametrize("text", ["dev", "", "main-abc", "0.16.0-nightly"])
def test_no_version(text: str) -> None:
    with pytest.raises(PlanError, match=r"no version.*SETUPTOOLS_SCM_PRETEND_VERSION"):
        release_of(text)


@pytest.mark.parametrize(
    ("text", "specifier", "inside"),
    [
        ("0.16.0rc2.dev87+g0b20469c6", ">=0.16", True),
        ("0.16.0rc2.dev87+g0b20469c6", "<0.16", False),
        ("0.16.0+cu129", "==0.16.0", True),
        ("0.11.0.post2", "==0.11.0", True),
        ("0.11.0.post2", ">0.11.0", False),
        ("0.17.1.dev3+gabc", ">=0.16,<0.17.1", False),
        ("0.17.1.dev3+gabc", "~=0.17.0", True),
        ("0.16.0rc1", "", True),
        ("0.16.0.dev1", "!=0.16.0", False),
    ],
)
def test_ranges(text: str, specifier: str, inside: bool) -> None:
    assert matches(release_of(text), specifier) is inside


def test_wrong_range() -> None:
    with pytest.raises(PlanError, match="no version range"):
        matches(Version("1"), "0.16 or so")


def test_installed(tmp_path: Path) -> None:
    package = Package(module="thing", distributions=("thing", "thing-cpu"), supported="")
    assert installed(package, [str(tmp_path)]) is None
    info = tmp_path / "thing_cpu-1.2.dist-info"
    info.mkdir()
    assert installed(package, [str(tmp_path)]) is None  # half removed: no metadata
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-cpu\nVersion: 1.2+cpu\n\nVersion: 9\n")
    assert installed(package, [str(tmp_path)]) == "1.2+cpu"
