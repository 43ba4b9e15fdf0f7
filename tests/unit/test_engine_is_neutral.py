"""The engine names no patch, runtime or consumer, imports none, and costs next to nothing to import."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import _vllm_compat_startup
import vllm_compat

STARTUP = Path(str(_vllm_compat_startup.__file__))
ENGINE = [*sorted(Path(vllm_compat.__file__).parent.glob("*.py")), *sorted(STARTUP.parent.glob("*.py"))]
FOREIGN = re.compile(r"vllm|speculators|torch|transformers|eagle", re.IGNORECASE)
OWN = re.compile(r"vllm[_-]compat", re.IGNORECASE)


@pytest.mark.parametrize("file", ENGINE, ids=lambda file: file.name)
def test_names_nothing_foreign(file: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    found = [f"{token.start[0]}: {token.string[:60]}" for token in tokens if FOREIGN.search(OWN.sub("", token.string))]
    assert found == []


def test_engine_is_there() -> None:
    names = {file.stem for file in ENGINE}
    assert {"activation", "cli", "ledger", "patching", "plan", "registry", "shapes"} <= names


def test_imports_nothing_foreign_or_heavy(world) -> None:
    code = """
    import sys
    before = set(sys.modules)
    import vllm_compat
    light = set(sys.modules) - before
    heavy = {"dataclasses", "typing", "re", "logging", "importlib.metadata", "packaging", "wrapt", "ast"}
    print(sorted(heavy & light))
    """
    assert world.run(code).stdout == "[]\n"
    code = """
import sys
before = set(sys.modules)
import vllm_compat.cli, vllm_compat.engine, vllm_compat.judge, vllm_compat.shapes
foreign = {"torch", "vllm", "speculators", "transformers", "numpy", "wrapt"}
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} & foreign))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_startup_file_needs_only_modules_of_a_bare_start() -> None:
    code = f"""
import sys
before = set(sys.modules)
exec(compile(open({str(STARTUP)!r}).read(), "startup", "exec"), {{"__name__": "startup"}})
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
