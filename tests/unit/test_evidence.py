"""Records say what was compared, and the README's table says what the records do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..evidence import VERSIONS, Evidence
from .test_releases import FIELDS

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "versions": dict.fromkeys(VERSIONS, "1.2.3") | {"vllm": "0.16.0+cpu", "more": "not told"},
    "device": "cpu",
    "dtype": "torch.bfloat16",
    "model_runner": "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
}


def layer(rows: int, cosine: float, error: float) -> dict[str, Any]:
    return {"rows": rows, "min_cosine": cosine, "max_abs_error": 10 * error, "max_relative_error": error}


def test_a_record_holds_the_worst_of_all_comparisons(tmp_path: Path) -> None:
    evidence = Evidence(str(tmp_path / "new"))
    evidence.add([layer(10, 0.999, 0.01), layer(10, 0.995, 0.02)], tensor_parallel=1, patches=["b"], **PARTS)
    evidence.add([layer(5, 0.998, 0.03)], tensor_parallel=1, patches=["a", "b"], **PARTS)
    evidence.add([layer(7, 0.99, 0.05)], tensor_parallel=2, patches=["c"], **PARTS)
    one, two = evidence.write()
    assert [file.name for file in (one, two)] == [
        f"speculators-1.2.3-vllm-0.16.0-transformers-1.2.3-cpu-tp{n}.json" for n in (1, 2)
    ]
    record = json.loads(one.read_text())
    assert set(record) == FIELDS
    got = [record[name] for name in ("rows", "min_cosine", "max_error", "max_relative_error", "patches")]
    assert got == [25, 0.995, 0.3, 0.03, ["a", "b"]]
    assert record["cases"] == ["test_evidence.py::test_a_record_holds_the_worst_of_all_comparisons"]
    assert json.loads(two.read_text())["rows"] == 7


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the table is made of, with one record."""
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copy(ROOT / "docs" / "evidence" / "table.py", tmp_path / "docs" / "evidence")
    shutil.copytree(ROOT / "tests" / "releases", tmp_path / "tests" / "releases")
    evidence = Evidence(str(tmp_path / "docs" / "evidence"))
    evidence.add([layer(123_456, 0.9951, 0.0234)], tensor_parallel=1, patches=["a"], **PARTS)
    evidence.write()
    return tmp_path


def table(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "docs" / "evidence" / "table.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_is_made_of_the_records(tree: Path) -> None:
    assert table(tree, "--check").returncode == 1
    assert table(tree).returncode == 0
    assert table(tree, "--check").returncode == 0
    (row,) = (line for line in (tree / "README.md").read_text().splitlines() if line.startswith("| [0.16.0]"))
    assert "| CPU | 1 | 123 456 | 2.3 % | 0.9951 |" in row


def test_another_number_in_a_record_is_seen(tree: Path) -> None:
    table(tree)
    (file,) = (tree / "docs" / "evidence").glob("*.json")
    file.write_text(file.read_text().replace("123456", "123457"))
    done = table(tree, "--check")
    assert done.returncode == 1
    assert "123 457" in done.stdout


def test_a_readme_without_a_place_for_it_is_told(tree: Path) -> None:
    (tree / "README.md").write_text("# Nothing\n")
    done = table(tree)
    assert done.returncode == 1
    assert "no place for the table" in done.stdout
