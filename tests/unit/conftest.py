"""A small fake world: runtime `fakerun`, consumer `fakeuser`, and the package `fakepatches` that patches it.

Tests of activation run in processes of their own, without site-packages (`-S`), so that nothing but this
world and the engine is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import packaging
import pytest

import _vllm_compat_startup
import vllm_compat

RUNTIME = """
    class Engine:
        def step(self, batch, *, grammar=None): return ("runtime", batch)

    def start(config, blocks=1): return ("runtime", config)
"""
GEN = """
    from fakerun.core import Engine, start

    class Gen:
        def generate(self, prompt): return [prompt, start(1)]

        @staticmethod
        def helper(): return "plain"
"""
PATCHES = """
    import functools, os
    from vllm_compat.registry import *

    def make_start(original):
        @functools.wraps(original)
        def start(config, blocks=1):
            return ("patched", original(config))
        return start

    def make_generate(original):
        def generate(self, prompt): return ["patched", *original(self, prompt)]
        return generate

    def make_other(original):
        if os.environ.get("FAKE_BREAK"): raise ValueError("broken maker")
        return "patched other"

    def lend():
        if os.environ.get("FAKE_BREAK_LOAN"): raise ValueError("broken loan")
        import fakerun.core
        fakerun.core.old_name = "lent"
        def undo(): del fakerun.core.old_name
        return undo

    texts = dict(symptom="s", cause="c", does="d", retires=Retirement(when="never"), evidence="e")
    USER, RUN = {"fakeuser": ">=0.3,<0.4"}, {"fakerun": ">=2,<3"}
    SHAPE = Shape(module="fakerun.core", symbol="start", parameters=("config", "blocks"))
    LATER = Shape(module="fakerun.core", symbol="finish", releases=">=2.9")
    PATCHES = [
        Patch(id="start", ranges=RUN, shapes=(SHAPE, LATER), targets=(
            Rebind(module="fakeuser.gen", name="start", make=make_start),), **texts),
        Patch(id="generate", ranges=USER, after=("start",), targets=(
            Rebind(module="fakeuser.gen", name="Gen.generate", make=make_generate),
            Rebind(module="fakeuser.other", name="VALUE", make=make_other)), **texts),
        Patch(id="old", ranges={"fakerun": "<2"}, targets=(), **texts),
    ]
    if os.environ.get("FAKE_LOAN"):
        LOAN = Lend(module="fakeuser.borrower", name="fakerun.core.old_name", do=lend)
        PATCHES.append(Patch(id="loan", ranges=USER, targets=(LOAN,), **texts))
    SET = PatchSet(
        name="fakeuser",
        consumer=Package(module="fakeuser", distributions=("fakeuser",), supported=">=0.3,<0.4"),
        runtimes=(Package(module="fakerun", distributions=("fakerun-gpu", "fakerun"), supported=">=2",
                          newest="2.1.0", proven=("2.1.0", "2.0.0")),),
        patches=tuple(PATCHES),
    )
"""


class World:
    """Packages in a folder, and Python processes that see nothing else."""

    patience = 240  # seconds for one process

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.engine = folder / "engine"
        self.engine.mkdir(parents=True)
        for package in (_vllm_compat_startup, vllm_compat, packaging):
            source = Path(str(package.__file__)).parent
            (self.engine / source.name).symlink_to(source)
        self.write("fakerun/__init__.py", "")
        self.write("fakerun/core.py", RUNTIME)
        self.write("fakeuser/__init__.py", "")
        self.write("fakeuser/gen.py", GEN)
        self.write("fakeuser/other.py", "VALUE = 'plain'")
        self.write("fakeuser/borrower.py", "from fakerun.core import old_name\nimport fakeuser.gen")
        self.write("fakepatches/__init__.py", PATCHES)
        self.install("fakerun", "2.1.0")
        self.install("fakeuser", "0.3.0")
        self.install("fakepatches", "1.0", "[vllm_compat.patches]\nfakeuser = fakepatches:SET\n")

    def write(self, path: str, text: str) -> None:
        file = self.site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))

    def install(self, name: str, version: str | None, entry_points: str = "") -> None:
        """Metadata of a distribution; None takes it away."""
        for old in self.site.glob(f"{name}-*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        if version is not None:
            info = f"{name}-{version}.dist-info"
            self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nlong text\n")
            self.write(f"{info}/entry_points.txt", entry_points)

    def run(self, *parts: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs code (its parts one after the other) in a fresh Python; switches come only from `env`."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_COMPAT", "PYTHON"))}
        clean.update(env, PYTHONPATH=os.pathsep.join([str(self.site), str(self.engine)]))
        if "PYTHONPYCACHEPREFIX" not in env:
            clean["PYTHONDONTWRITEBYTECODE"] = "1"  # tests rewrite files faster than time stamps change
        return subprocess.run(
            [sys.executable, "-S", "-c", "\n".join(map(dedent, parts))],
            env=clean,
            cwd=self.site,
            capture_output=True,
            text=True,
            timeout=self.patience,
            check=False,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def check(world: World) -> Callable[..., str]:
    """Runs code in the world, demands that it succeeds, and returns its stderr."""

    def run(*parts: str, **env: str) -> str:
        done = world.run(*parts, **env)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run
