"""The README's table of what works where, made of the records in this folder and of the list of releases.

python docs/evidence/table.py           writes it between its markers
python docs/evidence/table.py --check   exit code 1, and the difference, where README and records disagree
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- evidence: `python docs/evidence/table.py` writes this -->", "<!-- /evidence -->"
COLUMNS = (
    *("vLLM", "speculators", "torch, transformers, Python", "device", "tensor parallel"),
    *("rows compared", "largest error of a row", "smallest cosine", "date"),
)


def records() -> list[tuple[Path, dict[str, Any]]]:
    return [(file, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(HERE.glob("*.json"))]


def releases() -> dict[str, dict[str, str]]:
    """vLLM release -> its entry in the list."""
    return tomllib.loads((ROOT / "tests" / "releases" / "releases.toml").read_text(encoding="utf-8"))["vllm"]


def release_of(version: str) -> str:
    """0.11.0.post2 and 0.16.0+cpu are builds of 0.11.0 and 0.16.0 (vllm_compat/versions.py)."""
    return ".".join(re.findall(r"\d+", version)[:3])


def shown(release: str) -> list[dict[str, Any]]:
    return [record for _, record in records() if release_of(record["vllm"]) == release]


def table() -> str:
    found = sorted(records(), key=lambda each: (_key(each[1]["vllm"]), each[1]["speculators"], each[0]))
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *(_row(file, record) for file, record in found)]
    lines += ["", "On a GPU only:", "", *_reasons("gpu")]
    lines += ["", "Without a record of a real run; `tox -e contract` reads their source:", "", *_reasons("contract")]
    return "\n".join(lines)


def _reasons(kind: str) -> list[str]:
    """A line for each reason that the list of releases gives under this key."""
    reasons: dict[str, list[str]] = {}
    for release, entry in releases().items():
        if kind in entry:
            reasons.setdefault(entry[kind], []).append(release)
    return [f"- vLLM {', '.join(which)}: {why}" for why, which in reasons.items()]


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, release_of(version).split(".")))


def _row(file: Path, record: dict[str, Any]) -> str:
    cells = [
        f"[{release_of(record['vllm'])}]({file.relative_to(ROOT).as_posix()})",
        record["speculators"],
        f"{record['torch'].partition('+')[0]}, {record['transformers']}, {record['python']}",
        "CPU" if record["device"] == "cpu" else record["device"],
        str(record["tensor_parallel"]),
        f"{record['rows']:,}".replace(",", " "),
        f"{100 * record['max_relative_error']:.1f} %",
        f"{record['min_cosine']:.4f}",
        record["date"],
    ]
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(check: bool) -> int:
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{README.name} has no place for the table: expected a line {BEGIN} and a line {END}")
        return 1
    new = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if not check:
        README.write_text(new, encoding="utf-8")
    elif new != text:
        lines = difflib.unified_diff(text.splitlines(), new.splitlines(), "README.md", "records", lineterm="", n=0)
        print("\n".join([*lines, "", "Write it anew: python docs/evidence/table.py"]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["--check"]))
