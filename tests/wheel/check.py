"""What `tox -e wheel` runs: build the sdist and the wheel from it, compare what is in them with the source
tree, then install the wheel in a fresh environment and use it there.

Run from anywhere with `build[uv]` installed: ``python tests/wheel/check.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folder in the source tree -> folder in the wheel.
SOURCES = {
    "_vllm_compat_startup": "_vllm_compat_startup",
    "vllm_compat": "vllm_compat",
    "patches": "vllm_compat/patches",
}
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
# Python looks for start-up files only at the root of site-packages.
ROOT_FILES = {f"_vllm_compat_startup/{name}": name for name in ("vllm_compat.pth", "vllm_compat.start")}
SDIST_EXTRA = {
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
}

# Runs in the fresh environment, isolated from the checkout: prints what the checks below read.
PROBE = """
import importlib.metadata, importlib.util, json, sys
before = set(sys.modules)
ours = sorted(name for name in before if "vllm" in name)
import vllm_compat
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
from vllm_compat.patches import SPECULATORS
import vllm_compat.patches.worker
entries = importlib.metadata.entry_points(group="vllm_compat.patches")
print(json.dumps({
    "file": vllm_compat.__file__,
    "version": vllm_compat.__version__,
    "metadata": importlib.metadata.version("vllm-compat"),
    "at_start": (ours, vllm_compat.status()["routes"][0]["route"]),
    "heavy": sorted(loaded & {"torch", "transformers", "vllm", "speculators", "numpy"}),
    "strays": [name for name in ("patches", "tests", "benchmarks") if importlib.util.find_spec(name)],
    "entries": [entry.name for entry in entries],
    "discovered": [entry.load() is SPECULATORS for entry in entries],
}))
"""


def expect(label: str, got: object, want: object) -> None:
    """Raises SystemExit with the difference where `got` is not `want`."""
    if got == want:
        print(f"ok: {label}")
        return
    if isinstance(got, set) and isinstance(want, set):
        raise SystemExit(f"FAILED: {label}: too much {sorted(got - want)}, missing {sorted(want - got)}")
    raise SystemExit(f"FAILED: {label}: got {got!r}, want {want!r}")


def source_files() -> dict[str, str]:
    """Every file that the packages are made of: path in the tree -> path in the wheel."""
    found = {
        path.relative_to(ROOT).as_posix(): f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return found | ROOT_FILES


def build(out: Path) -> tuple[Path, Path]:
    """The sdist from the tree and the wheel from the sdist, as an index and an installer would make them."""
    subprocess.run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", out, ROOT], check=True)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    sources = source_files()
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        expect("wheel contents", names, set(sources.values()) | {f"{info}/{name}" for name in DIST_INFO})
        expect(
            "top level", archive.read(f"{info}/top_level.txt").decode().split(), ["_vllm_compat_startup", "vllm_compat"]
        )
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if not name.startswith("vllm_compat.egg-info/")}
    expect("sdist contents", names, set(sources) | SDIST_EXTRA)


def check_use(wheel: Path, folder: Path) -> None:
    """Installs the wheel with its own dependencies alone: no vLLM and no consumer in that environment."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder / "env"], check=True)
    python, command = folder / "env/bin/python", folder / "env/bin/vllm-compat"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_COMPAT"))}

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(args, cwd=folder, env=env, capture_output=True, text=True, timeout=60)

    probe = run(python, "-c", PROBE)
    if probe.returncode:
        raise SystemExit(f"FAILED: the installed wheel does not work:\n{probe.stdout}{probe.stderr}")
    found = json.loads(probe.stdout)
    expect("imported from the wheel", Path(found["file"]).is_relative_to(folder), True)
    expect("version", found["version"], found["metadata"])
    expect("import stays light", found["heavy"], [])
    expect("no stray top-level package", found["strays"], [])
    expect("entry points", (found["entries"], found["discovered"]), (["speculators"], [True]))

    expect("the start-up file acts", found["at_start"], [["_vllm_compat_startup"], found["at_start"][1]])
    expect("by the route of this Python", found["at_start"][1], "start" if sys.version_info >= (3, 15) else "pth")
    check_consumer(python, folder, run)

    plan = run(command, "plan", "--json")
    expect(
        "plan says no where the consumer is missing",
        (plan.returncode, "speculators" in plan.stdout),
        (1, True),
    )
    expect("plan's schema", json.loads(plan.stdout)["schema"], 1)
    expect("plan in words", (run(command, "plan").returncode, run(command, "list").returncode), (1, 0))
    expect("python -m vllm_compat", run(python, "-m", "vllm_compat", "list").returncode, 0)

    doctor = json.loads(run(command, "doctor", "--json").stdout)
    expect("doctor sees the route", {each["route"]: each["live"] for each in doctor["routes"]}["startup"], True)
    subprocess.run([*uv, "pip", "uninstall", "--quiet", "--python", python, "vllm-compat"], check=True)
    expect("uninstall leaves nothing", sorted((folder / "env").rglob("*vllm?compat*")), [])
    start = run(python, "-c", "import sys; print([name for name in sys.modules if 'vllm' in name])")
    expect("a start after it", (start.stdout, start.stderr), ("[]\n", ""))


def check_consumer(python: Path, folder: Path, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """An unmodified script whose consumer cannot be patched here gets one line; asked for, an error."""
    (folder / "speculators.py").write_text("print('imported')")
    done = run(python, "-c", "import speculators")
    expect("an ambient problem is one line", (done.stdout, done.stderr.count("\n")), ("imported\n", 1))
    (folder / "script.py").write_text("import speculators")
    done = run(folder / "env/bin/vllm-compat", "run", folder / "script.py")
    expect("a problem of `run` is an error", (done.returncode, done.stdout), (1, ""))
    done = run(python, "-S", "-c", "import speculators")
    expect("without site nothing is said", (done.stdout, done.stderr), ("imported\n", ""))
    (folder / "speculators.py").unlink()


def check_editable(folder: Path) -> None:
    """An editable install has everything but the start-up file, and says so."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder / "edit"], check=True)
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    python = folder / "edit/bin/python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, "--editable", tree], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_COMPAT"))}
    code = (
        "import json, sys; assert not any('vllm_compat_startup' in name for name in sys.modules)\n"
        "from importlib.metadata import entry_points\n"
        "(plugin,) = entry_points(group='vllm.general_plugins'); plugin.load()()\n"
        "from vllm_compat.routes import routes\n"
        "import vllm_compat.patches.worker.extension\n"
        "print(json.dumps({each.route: [each.live, each.text] for each in routes()}))"
    )
    done = subprocess.run([python, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FAILED: the editable install does not work:\n{done.stderr}")
    live, text = json.loads(done.stdout)["startup"]
    expect("an editable install says what it lacks", (live, "editable install" in text), (False, True))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name).resolve()
        sdist, wheel = build(folder / "dist")
        check_contents(sdist, wheel)
        check_use(wheel, folder)
        check_editable(folder)
    print(f"{sdist.name} and {wheel.name}: all checks passed")


if __name__ == "__main__":
    main()
