"""Every release still has what the patches for it build on. Nothing is installed: sources come out of the wheels.

One test for each name that a patch names, in each release of the patch's range: the shapes of all patches fit, and the
fingerprint is the committed one. So a change upstream is one red test that says which patches are concerned and what
is different; `tox -e contract -- --refresh` commits to it, once somebody has looked.
"""

from __future__ import annotations

from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_compat.judge import decide
from vllm_compat.registry import load
from vllm_compat.switches import Switches

from .contract import Contract, Release
from .targets import CONSUMER, Name


def test_target(contract: Contract, release: Release, name: Name) -> None:
    said = [*release.misfits[name], contract.changes(release, name)]
    if any(said):
        pytest.fail("\n".join(filter(None, said)), pytrace=False)


def test_plan(contract: Contract, runtime: Release, tmp_path: Path) -> None:
    """Every listed release is one that the patches say they are for, beside the transformers that it admits.

    Shapes are left to `test_target`, so that one change is one red test.
    """
    wants = _requirements(runtime)
    (torch,) = wants["torch"].specifier
    admitted = [
        each for each in _of(contract, "transformers") if wants["transformers"].specifier.contains(each.version)
    ]
    assert admitted, f"{runtime.wheel.where} wants {wants['transformers']}: releases.toml has none of these"
    for consumer in _of(contract, CONSUMER):
        for transformers in {admitted[0].version: admitted[0], admitted[-1].version: admitted[-1]}.values():
            folder = tmp_path / f"{consumer.version} {transformers.version}"
            (info := folder / "torch.dist-info").mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: torch\nVersion: {torch.version}\n")
            for wheel in (consumer.wheel, runtime.wheel, transformers.wheel):
                for source in wheel.folder.iterdir():
                    if source.is_dir():
                        (folder / source.name).symlink_to(source)
            plan = decide(load(CONSUMER), target=folder, switches=Switches())
            said = [each.problem for each in plan.packages if each.problem] + list(plan.warnings)
            assert not said, f"{plan.headline()}, transformers {transformers.version}: {'; '.join(said)}"


def _of(contract: Contract, package: str) -> list[Release]:
    found = [release for release in contract.releases if release.package == package]
    for release in found:
        if release.error is not None:
            raise release.error
    return found


def _requirements(release: Release) -> dict[str, Requirement]:
    """What a wheel wants on this kind of machine."""
    text = (release.wheel.metadata / "METADATA").read_text(encoding="utf-8")
    wants = [Requirement(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]
    return {each.name: each for each in wants if each.marker is None or each.marker.evaluate({"extra": ""})}
