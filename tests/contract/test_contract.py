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
from .targets import CONSUMER, RUNTIME, Name

# Beside which a release may have been installed: from the oldest that any wants to the newest there is.
TRANSFORMERS = ("4.57.6", "5.5.4", "5.10.4", "5.16.1", "5.20.0", "5.24.0")


def test_target(contract: Contract, release: Release, name: Name) -> None:
    said = [*release.misfits[name], contract.changes(release, name)]
    if any(said):
        pytest.fail("\n".join(filter(None, said)), pytrace=False)


def test_plan(contract: Contract, release: Release, tmp_path: Path) -> None:
    """Every listed release is one that the patches say they are for, beside every transformers that it admits.

    Shapes are left to `test_target`, so that one change is one red test.
    """
    if release.package == CONSUMER:
        runtimes = [each for each in contract.releases if each.package == RUNTIME and each.error is None]
        assert runtimes, "no release of the runtime could be read"
        pairs = [(release, runtimes[-1])]
    else:
        pairs = [(each, release) for each in contract.releases if each.package == CONSUMER]
    for consumer, runtime in pairs:
        wants = _requirements(runtime)
        admitted = [each for each in TRANSFORMERS if wants["transformers"].specifier.contains(each)]
        assert admitted, f"{runtime.wheel.where} wants {wants['transformers']}: none of {', '.join(TRANSFORMERS)}"
        (torch,) = wants["torch"].specifier
        for transformers in admitted:
            folder = tmp_path / f"{consumer.version} {transformers}"
            for wheel in (consumer.wheel, runtime.wheel):
                for source in (*wheel.folder.glob("[a-z]*"),):
                    if source.is_dir():
                        folder.mkdir(exist_ok=True)
                        (folder / source.name).symlink_to(source)
            for name, version in (("torch", torch.version), ("transformers", transformers)):
                info = folder / f"{name}-{version}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
            plan = decide(load(CONSUMER), target=folder, switches=Switches())
            said = [each.problem for each in plan.packages if each.problem] + list(plan.warnings)
            assert not said, f"{plan.headline()}, transformers {transformers}: {'; '.join(said)}"


def _requirements(release: Release) -> dict[str, Requirement]:
    """What a wheel wants on this kind of machine."""
    text = (release.wheel.metadata / "METADATA").read_text(encoding="utf-8")
    wants = [Requirement(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]
    return {each.name: each for each in wants if each.marker is None or each.marker.evaluate({"extra": ""})}
