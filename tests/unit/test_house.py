"""What the README, CI and the package's metadata promise to each other."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_the_readme_test_command() -> None:
    (command,) = re.findall(r"^python3 -m venv .*tox -e tests$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_core_dependencies_leave_the_users_stack_alone() -> None:
    requirements = [Requirement(text) for text in metadata.requires("vllm-compat") or ()]
    core = {requirement.name for requirement in requirements if requirement.marker is None}
    assert core == {"packaging", "wrapt"}


def test_the_engine_contract_covers_every_engine_module() -> None:
    contract = (ROOT / "pyproject.toml").read_text().partition("source_modules = [")[2].partition("]")[0]
    held = set(re.findall(r'"vllm_compat\.(\w+)"', contract))
    outside = {"__init__", "__main__", "cli"}  # these may reach for the demo
    assert held == {path.stem for path in (ROOT / "vllm_compat").glob("*.py")} - outside
