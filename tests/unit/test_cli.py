"""The command line in the fake world."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest


@pytest.fixture
def cli(world) -> Any:
    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return world.run(f"import sys, vllm_compat.cli as cli; sys.exit(cli.main({list(arguments)!r}))", **env)

    return run


def test_plan(cli, world) -> None:
    done = cli("plan")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "fakeuser 0.3.0 on fakerun 2.1.0: 2 patches apply, 1 not needed"
    assert "not-needed  old" in done.stdout
    assert "fakerun 2.1.0 is not in <2" in done.stdout
    plan = json.loads(cli("plan", "--json").stdout)
    assert plan["schema"] == 1
    assert plan["ok"] is True
    assert [each["status"] for each in plan["plans"][0]["decisions"]] == ["apply", "apply", "not-needed"]


def test_plan_with_problems(cli, world) -> None:
    world.install("fakerun", None)
    done = cli("plan")
    assert done.returncode == 1
    assert "problem: fakerun" in done.stdout
    done = cli("plan", "--json", VLLM_COMPAT_DISABLE="strat")
    assert done.returncode == 1
    assert "did you mean 'start'?" in json.loads(done.stdout)["plans"][0]["problems"][1]


def test_target(cli, world, tmp_path) -> None:
    other = tmp_path / "other"
    for name in ("fakeuser", "fakerun"):
        (other / f"{name}-1.0.dist-info").mkdir(parents=True)
        version = {"fakeuser": "0.3.1", "fakerun": "2.0.0"}[name]
        (other / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    done = cli("plan", "--target", str(other))
    assert done.returncode == 1
    assert "fakeuser 0.3.1 on fakerun 2.0.0" in done.stdout
    assert "start: fakerun.core.start: expected a module fakerun.core, found no source file" in done.stdout
    (other / "fakerun").mkdir()
    (other / "fakerun" / "core.py").write_text("def start(config, blocks): ...")
    assert cli("plan", "--target", str(other)).returncode == 0
    assert cli("plan", "--target", str(other / "none")).returncode == 2


def test_blocked(cli, world) -> None:
    text = (world.site / "fakepatches" / "__init__.py").read_text()
    world.write("fakepatches/__init__.py", text.replace('after=("start",)', 'needs=("start",)'))
    assert cli("plan").returncode == 0
    done = cli("plan", VLLM_COMPAT_DISABLE="start")
    assert done.returncode == 1
    assert "problem: generate: needs start, which does not apply (disabled: VLLM_COMPAT_DISABLE)" in done.stdout
    assert cli("plan", VLLM_COMPAT_DISABLE="start,generate").returncode == 0


def test_list_and_explain(cli) -> None:
    assert (
        cli("list").stdout
        == "fakeuser:\n  start     fakerun >=2,<3\n  generate  fakeuser >=0.3,<0.4\n  old       fakerun <2\n"
    )
    listed = json.loads(cli("list", "--json").stdout)["patches"]
    assert listed[0]["targets"] == ["fakeuser.gen.start"]
    shown = cli("explain", "generate").stdout
    assert "changes:  fakeuser.gen.Gen.generate, fakeuser.other.VALUE" in shown
    assert "here:     apply" in shown
    assert json.loads(cli("explain", "generate", "--json").stdout)["id"] == "generate"
    wrong = cli("explain", "strat")
    assert wrong.returncode == 1
    assert wrong.stderr == "vllm-compat: no patch is called 'strat': did you mean 'start'?\n"


def test_module_and_usage(world) -> None:
    code = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('vllm_compat', run_name='__main__')"
    assert world.run(code.format(["list"])).stdout.startswith("fakeuser:")
    assert world.run(code.format([])).returncode == 2
    assert world.run(code.format(["--version"])).stdout == "vllm-compat 0.1.0\n"
    assert "demo" in world.run(code.format(["--help"])).stdout


def test_imports_neither_consumer_nor_runtime(world) -> None:
    code = """
    import sys, vllm_compat.cli as cli
    for arguments in (["plan"], ["list"], ["explain", "start"]): cli.main(arguments)
    assert not {"fakeuser", "fakerun"} & set(sys.modules)
    """
    done = world.run(code)
    assert done.returncode == 0, done.stderr
