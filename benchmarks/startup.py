"""What vllm_compat costs at start-up, in fresh interpreters: medians and ratios.

- `start`: a Python that imports nothing of ours, with the installed start-up file against the same with a comment in
  place of its line. Budget: 1 ms more, with the bytecode that pip makes when it installs. `start-uncompiled`: without
  (uv makes none, the first start does; with PYTHONDONTWRITEBYTECODE every start compiles). No budget.
- `sitecustomize`: the same with our folder on PYTHONPATH, which also reads which packages bring patches.
- `import`: Python with `import vllm_compat` against bare Python. Budget: 15 ms more.
- `preflight`: `vllm-compat doctor`, which also makes the plan, against bare Python. Budget: 500 ms more.
- `apply`: plan and apply every patch that applies here, in a process that has already imported the consumer:
  the price on top of that import, without the import's own noise of hundreds of milliseconds. Budget: 50 ms.
- `consumer`: the same in the usual order, `import vllm_compat` first, as a ratio of whole processes.

`apply` and `consumer` need the consumer and a vLLM in the environment, and are left out without them.
Run as ``python benchmarks/startup.py [--json]``; the exit code is 1 where a budget is exceeded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONSUMER = "speculators.data_generation.vllm_hidden_states_generator"
BARE = "pass"
IMPORT = "import vllm_compat"
PREFLIGHT = "from vllm_compat.cli import main; main(['doctor', '--json'])"
# `require` raises where a patch is missing, so a number without the patches is never reported.
APPLY = f"""
import time
import {CONSUMER}
begin, cpu = time.perf_counter(), time.process_time()
import vllm_compat
begin, cpu = time.perf_counter() - begin, time.process_time() - cpu
vllm_compat.require()
print(begin * 1000, cpu * 1000)
"""
CONSUMER_ALONE = f"import {CONSUMER}"
CONSUMER_PATCHED = f"import vllm_compat\nimport {CONSUMER}\nvllm_compat.require()"
WHEEL, PAIR = (
    "an installed wheel (an editable install has no start-up file)",
    "speculators and vllm in this environment",
)
NEEDS = {
    "start": WHEEL,
    "start-uncompiled": WHEEL,
    "sitecustomize": WHEEL,
    "import": "",
    "preflight": "",
    "apply": PAIR,
    "consumer": PAIR,
}
BUDGETS = {"start": 1.0, "import": 15.0, "preflight": 500.0, "apply": 50.0}


def run(code: str, python: str = sys.executable, **more: str) -> tuple[float, str]:
    """Wall milliseconds of a fresh interpreter that runs `code`, and what it printed last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_COMPAT")}
    env.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", **more)
    command = [python, "-c", code]
    here = Path(__file__).parent  # `-c` puts the working folder first; not the checkout
    begin = time.perf_counter()
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, check=False)
    wall = (time.perf_counter() - begin) * 1000
    if done.returncode:
        raise SystemExit(f"failed: python -c {code!r}\n{done.stderr}")
    lines = done.stdout.split("\n")
    return wall, lines[-2] if len(lines) > 1 else ""


def compare(base: str, other: str, rounds: int) -> dict[str, float]:
    return compare_runs(lambda: run(base)[0], lambda: run(other)[0], rounds)


def compare_runs(base: Callable[[], float], other: Callable[[], float], rounds: int) -> dict[str, float]:
    """Runs both in turn, so that a drift of the machine meets both alike; the first only warms caches."""
    pairs = [(base(), other()) for _ in range(rounds + 1)][1:]
    return {
        "base_ms": statistics.median(first for first, _ in pairs),
        "with_ms": statistics.median(second for _, second in pairs),
        "more_ms": statistics.median(second - first for first, second in pairs),
        "ratio": statistics.median(second / first for first, second in pairs),
        "rounds": rounds,
    }


def compare_starts(rounds: int) -> dict[str, Any]:
    """Two fresh venvs with the installed files, of which one has a comment for the start-up file's line."""
    import _vllm_compat_startup
    import vllm_compat

    name = "vllm_compat.start" if sys.version_info >= (3, 15) else "vllm_compat.pth"
    packages = [Path(str(module.__file__)).parent for module in (_vllm_compat_startup, vllm_compat)]
    startup = packages[0].parent / name
    if not startup.is_file():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {}
        for kind in ("without", "with"):
            venv.create(Path(folder, kind), symlinks=True)
            (site,) = Path(folder, kind).glob("lib/python*/site-packages")
            for package in packages:
                shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
            (site / name).write_text(startup.read_text() if kind == "with" else "#\n")
            pythons[kind] = str(Path(folder, kind, "bin", "python"))

        def starts(**env: str) -> dict[str, float]:
            """Differences below a millisecond want more rounds."""
            return compare_runs(
                lambda: run(BARE, pythons["without"], **env)[0],
                lambda: run(BARE, pythons["with"], **env)[0],
                3 * rounds,
            )

        uncompiled = starts(PYTHONDONTWRITEBYTECODE="1")
        compiled = starts(PYTHONDONTWRITEBYTECODE="")
        ambient = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(packages[1] / "ambient")}
        return {
            "start": compiled,
            "start-uncompiled": uncompiled,
            "sitecustomize": compare_runs(lambda: run(BARE)[0], lambda: run(BARE, **ambient)[0], 3 * rounds),
        }


def measure(rounds: int, consumer_rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {"python": sys.version.split()[0], **compare_starts(rounds)}
    result["import"] = compare(BARE, IMPORT, rounds)
    result["preflight"] = compare(BARE, PREFLIGHT, consumer_rounds)
    if all(importlib.util.find_spec(name) for name in ("speculators", "vllm")):
        times = [[float(part) for part in run(APPLY)[1].split()] for _ in range(consumer_rounds + 1)][1:]
        result["apply"] = {
            "more_ms": statistics.median(wall for wall, _ in times),
            "cpu_ms": statistics.median(cpu for _, cpu in times),  # says whether the machine was busy
            "rounds": consumer_rounds,
        }
        result["consumer"] = compare(CONSUMER_ALONE, CONSUMER_PATCHED, consumer_rounds)
    result["over_budget"] = [
        name for name, budget in BUDGETS.items() if name in result and result[name]["more_ms"] > budget
    ]
    return result


def as_text(result: dict[str, Any]) -> str:
    lines = [f"Python {result['python']}; medians of fresh interpreters"]
    for name, needs in NEEDS.items():
        if name not in result:
            lines.append(f"{name:16} not measured: needs {needs}")
            continue
        row = result[name]
        text = f"{name:16} {row['more_ms']:+9.2f} ms"
        if "ratio" in row:
            text += f"  ratio {row['ratio']:.3f}  ({row['base_ms']:.1f} -> {row['with_ms']:.1f} ms)"
        if "cpu_ms" in row:
            text += f"  (of it {row['cpu_ms']:.1f} ms on the processor)"
        if name in BUDGETS:
            text += f"  budget {BUDGETS[name]:.0f} ms"
        lines.append(f"{text}  rounds {row['rounds']}")
    lines.append(f"over budget: {', '.join(result['over_budget']) or 'nothing'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What vllm_compat costs at start-up.")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of interpreters for `import` (default 21)")
    parser.add_argument("--consumer-rounds", type=int, default=3, help="the same with the consumer (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(arguments)
    result = measure(args.rounds, args.consumer_rounds)
    print(json.dumps(result) if args.json else as_text(result))
    return 1 if result["over_budget"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
