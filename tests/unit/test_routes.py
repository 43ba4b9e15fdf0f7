"""The routes that need no import of ours: start-up file, sitecustomize, plugin. Real Python starts in a fresh venv."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import packaging
import pytest

import _vllm_compat_startup
import vllm_compat

ROOT = Path(__file__).resolve().parents[2]
STARTUP = ROOT / "_vllm_compat_startup"
PTH = (STARTUP / "vllm_compat.pth").read_text()
START = (STARTUP / "vllm_compat.start").read_text()
AMBIENT = Path(vllm_compat.__file__).parent / "ambient"
USE = """
    import fakeuser.gen, sys
    print("patched" if fakeuser.gen.start(1) == ("patched", ("runtime", 1)) else "plain", flush=True)
"""
LINE = "vllm_compat 0.1.0: fakeuser 0.3.0 on fakerun 2.1.0: 2 patches apply, 1 not needed (vllm-compat plan)\n"
Python = Callable[..., subprocess.CompletedProcess[str]]


class Environment:
    """A venv with the fake world of `conftest` and our package in its site-packages, as an installer leaves them."""

    def __init__(self, folder: Path, world) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        for source in world.site.iterdir():
            (self.site / source.name).symlink_to(source)
        for package in (vllm_compat, packaging):
            source = Path(str(package.__file__)).parent
            (self.site / source.name).symlink_to(source)
        self.hook = self.site / "_vllm_compat_startup" / "__init__.py"
        shutil.copytree(Path(str(_vllm_compat_startup.__file__)).parent, self.hook.parent)
        self.pth = self.site / "vllm_compat.pth"
        self.pth.write_text(PTH.replace("speculators", "fakeuser"))

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The environment's Python with these arguments; the last one may be code, indented."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
        return subprocess.run(
            [str(self.python), *arguments[:-1], dedent(arguments[-1])],
            env={**clean, **env},
            cwd=self.site.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def script(self, name: str, text: str) -> str:
        file = self.site.parent / name
        file.write_text(dedent(text))
        return str(file)


@pytest.fixture
def python(tmp_path: Path, world) -> Environment:
    return Environment(tmp_path / "venv", world)


@pytest.fixture(params=["startup file", "sitecustomize"])
def ambient(request: pytest.FixtureRequest, python: Environment, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Either ambient route alone."""
    if request.param == "sitecustomize":
        python.pth.unlink()
        call = python.__call__
        path = str(AMBIENT)
        monkeypatch.setattr(
            Environment, "__call__", lambda self, *args, **env: call(*args, **{"PYTHONPATH": path, **env})
        )
    return python


def test_the_files_name_what_the_entry_points_name() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'speculators = "vllm_compat.patches:SPECULATORS"' in text
    (line,) = [line for line in START.splitlines() if line and not line.startswith("#")]
    assert f"{line.replace('start_', 'plugin_')}" in text
    assert pkgutil.resolve_name(line)
    assert "arm(['speculators'], 'pth')" in PTH
    assert PTH.startswith("import ")
    assert PTH.count("\n") == 1


def test_a_start_loads_one_file_and_nothing_else(python: Environment) -> None:
    code = "import sys; print(sorted(sys.modules))"
    with_it = set(eval(python("-c", code).stdout))
    python.pth.write_text("#\n")  # any such file makes newer Pythons load a codec
    assert with_it - set(eval(python("-c", code).stdout)) == {"_vllm_compat_startup"}


def test_the_start_file_of_newer_pythons(python: Environment) -> None:
    """What `site` of Python 3.15 does with it (PEP 829): each line but comments is resolved, and called bare."""
    (line,) = [line for line in START.splitlines() if not line.startswith("#")]
    code = f"import pkgutil; pkgutil.resolve_name({line.replace('speculators', 'fakeuser')!r})()"
    python.pth.unlink()
    done = python("-c", code + dedent(USE))
    assert (done.stdout, done.stderr) == ("patched\n", LINE)


def test_an_unmodified_script(ambient: Environment) -> None:
    done = ambient(ambient.script("script.py", USE))
    assert (done.returncode, done.stdout, done.stderr) == (0, "patched\n", LINE)
    assert ambient("-c", USE, VLLM_COMPAT="0").stdout == "plain\n"
    assert ambient("-c", "import os; os.environ['VLLM_COMPAT'] = '0'" + dedent(USE)).stdout == "plain\n"


def test_switches_of_a_python_start(python: Environment) -> None:
    for flags in (["-I"], ["-E"], ["-s"], ["-O"], ["-B"], ["-P"] if sys.version_info >= (3, 11) else []):
        assert python(*flags, "-c", USE).stdout == "patched\n", flags
    done = python("-S", "-c", "print(1)")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_sitecustomize_route_where_python_skips_it(python: Environment) -> None:
    python.pth.unlink()
    for flag in ("-I", "-E", "-S"):
        done = python(flag, "-c", "print(1)", PYTHONPATH=str(AMBIENT))
        assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    "broken", ["no hook", "hook", "half a hook", "no package", "package", "discovery", "no entry points"]
)
def test_broken_installs_never_break_a_start(ambient: Environment, world, broken: str) -> None:
    if broken == "no hook":
        ambient.hook.unlink()
    elif broken == "half a hook":
        (ambient.hook.parent / "hook.py").unlink()
    elif broken == "hook":
        ambient.hook.write_text("def half(:")
    elif broken == "no entry points":
        world.install("fakepatches", None)
        (ambient.site / "fakepatches-1.0.dist-info").unlink()
    else:
        (ambient.site / "vllm_compat").unlink()
        if broken == "package":
            (ambient.site / "vllm_compat").mkdir()
            (ambient.site / "vllm_compat" / "__init__.py").write_text("from vllm_compat import missing")
        elif broken == "discovery":
            (ambient.site / "vllm_compat").mkdir()
    done = ambient("-c", "print(1)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    done = ambient("-c", USE)
    assert (done.returncode, done.stdout) == (0, "plain\n")
    assert done.stderr.count("\n") <= 1, done.stderr
    assert "Traceback" not in done.stderr


def test_starts_without_home_caches_or_streams(ambient: Environment) -> None:
    nowhere = {"HOME": "/nonexistent", "PYTHONPYCACHEPREFIX": "/proc/nonexistent", "TMPDIR": "/nonexistent"}
    done = ambient("-c", USE, **nowhere)
    assert (done.returncode, done.stdout) == (0, "patched\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("HOME", "PYTHONPATH")}
    command = f'"{ambient.python}" -c "import fakeuser.gen" 2>&- 1>&- 0<&-'
    assert subprocess.run(["sh", "-c", command], env=clean, check=False).returncode == 0


def test_zip_files(ambient: Environment, tmp_path: Path) -> None:
    """A consumer in a zip is patched like any other; our package in a zip breaks nothing."""
    archive = tmp_path / "consumer.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for source in sorted((ambient.site / "fakeuser").glob("*.py")):
            file.write(source, f"fakeuser/{source.name}")
    (ambient.site / "fakeuser").unlink()
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r})" + dedent(USE) + "print(type(fakeuser.__loader__).__name__)"
    )
    done = ambient("-c", code)
    assert done.stdout == "patched\nzipimporter\n", done.stderr
    ours = tmp_path / "ours.zip"
    with zipfile.ZipFile(ours, "w") as file:
        for source in sorted(Path(vllm_compat.__file__).parent.rglob("*.py")):
            file.write(source, f"vllm_compat/{source.relative_to(Path(vllm_compat.__file__).parent)}")
    (ambient.site / "vllm_compat").unlink()
    done = ambient("-c", f"import sys; sys.path[:0] = [{str(ours)!r}, {str(archive)!r}]" + dedent(USE))
    assert done.stdout == "patched\n", done.stderr
    in_zip = os.pathsep.join([f"{ours}/vllm_compat/ambient", str(ours)])
    done = ambient("-c", "print(1)", PYTHONPATH=in_zip)
    assert (done.returncode, done.stdout) == (0, "1\n")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(ambient: Environment, method: str) -> None:
    """The parent may have imported the consumer before or not; children find it patched either way."""
    script = ambient.script(
        "many.py",
        f"""
        import multiprocessing, sys

        def child(queue):
            import fakeuser.gen, vllm_compat
            vllm_compat.require()
            queue.put(fakeuser.gen.start(1))

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            for _ in range(2):
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=60))
                process.join()
                assert process.exitcode == 0
                import fakeuser.gen
        """,
    )
    done = ambient(script)
    assert done.stdout == "('patched', ('runtime', 1))\n" * 2, done.stderr


def test_children_of_every_kind(ambient: Environment) -> None:
    done = ambient(
        "-c",
        f"""
        import os, subprocess, sys
        code = {dedent(USE)!r}
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="", flush=True)
        if os.fork() == 0:
            exec(code)
            os._exit(0)
        os.wait()
        os.execv(sys.executable, [sys.executable, "-c", code])
        """,
    )
    assert done.stdout == "patched\n" * 3, done.stderr


def test_threads_and_reload(ambient: Environment, world) -> None:
    done = ambient(
        "-c",
        """
        import importlib, sys, threading
        sys.setswitchinterval(1e-5)
        names = ["fakeuser.gen", "fakeuser.other", "fakeuser", "fakerun.core"]
        failed = []
        def work(name):
            try: importlib.import_module(name)
            except BaseException as error: failed.append(error)
        threads = [threading.Thread(target=work, args=(names[n % 4],), daemon=True) for n in range(16)]
        for each in threads: each.start()
        for each in threads: each.join(20)
        assert not failed and not any(each.is_alive() for each in threads), failed
        for _ in range(2):
            gen = sys.modules["fakeuser.gen"]
            assert gen.start(1) == ("patched", ("runtime", 1))
            importlib.reload(sys.modules["fakeuser"])
            importlib.reload(gen)
        import vllm_compat
        vllm_compat.require()
        assert len(vllm_compat.status()["patches"]) == 3
        """,
    )
    assert (done.returncode, done.stderr) == (0, LINE)


def test_all_routes_at_once_are_one(python: Environment) -> None:
    done = python(
        "-c",
        """
        import _vllm_compat_startup
        _vllm_compat_startup.plugin_fakeuser()
        _vllm_compat_startup.start_fakeuser()
        import vllm_compat, fakeuser.gen, sys
        vllm_compat.activate()
        vllm_compat.require()
        status = vllm_compat.status()
        assert [each["route"] for each in status["routes"]][:5] == ["pth", "sitecustomize", "plugin", "start", "import"]
        assert not any(each["inherited"] for each in status["routes"])
        assert len(status["patches"]) == 2 and fakeuser.gen.start(1) == ("patched", ("runtime", 1))
        assert sum(type(each).__name__ == "Finder" for each in sys.meta_path) == 1
        assert vllm_compat.deactivate() == ()
        _vllm_compat_startup.plugin_fakeuser()
        assert not vllm_compat.status()["active"]
        """,
        PYTHONPATH=str(AMBIENT),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_users_own_sitecustomize_runs(python: Environment, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__, __name__, __spec__.origin\n")
    path = os.pathsep.join([str(AMBIENT), str(own)])
    code = "import sys, sitecustomize as own; print(sys.theirs == (own.__file__, 'sitecustomize', own.__file__))"
    done = python("-c", code + dedent(USE), PYTHONPATH=path)
    assert (done.stdout, done.stderr) == ("True\npatched\n", LINE)
    for text in ("1 / 0", "import no_such_module", "raise SystemExit(3)"):
        (own / "sitecustomize.py").write_text(text)
        alone = python("-c", "print(1)", PYTHONPATH=str(own), PYTHONVERBOSE="")
        chained = python("-c", "print(1)", PYTHONPATH=path, PYTHONVERBOSE="")
        assert (chained.returncode, chained.stdout) == (alone.returncode, alone.stdout)
        assert chained.stderr.splitlines()[:1] == alone.stderr.splitlines()[:1]


def test_run(python: Environment, world) -> None:
    python.pth.unlink()
    start = "import sys; from vllm_compat.cli import main; sys.exit(main())"
    script = python.script("script.py", USE + "    print(sys.argv[1:]); sys.exit(7)")
    done = python("-c", start, "run", script, "--json", "-m", "x")
    assert (done.returncode, done.stdout) == (7, "patched\n['--json', '-m', 'x']\n"), done.stderr
    assert done.stderr == ""
    module = python("-c", start, "run", "-m", "fakemain", "-c")
    assert "No module named fakemain" in module.stderr
    (python.site / "fakemain.py").write_text(dedent(USE) + "print(sys.argv[1:])")
    assert python("-c", start, "run", "-m", "fakemain", "-c").stdout == "patched\n['-c']\n"
    folder = python("-c", start, "sitecustomize-dir").stdout.strip()
    assert (Path(folder) / "sitecustomize.py").is_file()
    # A person asked for it, so a problem is an error; not so in children, who inherit the path.
    world.install("fakerun", "1.9")
    (python.site / "fakerun-1.9.dist-info").symlink_to(world.site / "fakerun-1.9.dist-info")
    done = python("-c", start, "run", script)
    assert done.returncode == 1
    assert "CompatError" in done.stderr or "PlanError" in done.stderr
    parent = python.script("parent.py", f"import subprocess, sys; subprocess.run([sys.executable, {script!r}])")
    done = python("-c", start, "run", parent)
    assert done.stdout.startswith("plain\n")
    assert done.stderr.count("\n") == 1


def test_run_refuses_what_the_script_would_not_find(python: Environment) -> None:
    python.pth.unlink()
    for name in ("vllm_compat", "_vllm_compat_startup"):
        (python.site / name).rename(python.site.parent / name)
    done = python("-m", "vllm_compat", "run", "x.py")
    assert done.returncode == 1
    assert "is found only in the current folder" in done.stderr


PLUGINS = """
    import os
    from importlib.metadata import entry_points

    def load():
        allowed = os.environ.get("VLLM_PLUGINS")
        for each in entry_points(group="fakerun.plugins"):
            if allowed is None or each.name in allowed.split(","):
                each.load()()
"""


def test_plugin_of_the_runtime(python: Environment) -> None:
    (python.site / "ours-1.0.dist-info").mkdir()
    (python.site / "ours-1.0.dist-info" / "METADATA").write_text("Name: ours\nVersion: 1.0\n")
    entry = "[fakerun.plugins]\nvllm_compat = _vllm_compat_startup:plugin_fakeuser\n"
    (python.site / "ours-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (python.site / "fakeplugins.py").write_text(dedent(PLUGINS))
    code = "import fakeplugins, sys; fakeplugins.load(); print('vllm_compat' in sys.modules)" + dedent(USE)
    assert python("-c", code).stdout == "False\npatched\n"
    assert python("-c", code, VLLM_PLUGINS="other").stdout == "False\npatched\n"
    python.pth.unlink()
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("False\npatched\n", LINE)
    assert python("-c", code, VLLM_PLUGINS="other").stdout == "False\nplain\n"
    assert python("-c", "import vllm_compat; " + code, VLLM_PLUGINS="").stdout == "True\npatched\n"


def test_routes_of_a_fork_are_inherited(python: Environment) -> None:
    done = python(
        "-c",
        """
        import os, json
        if os.fork() == 0:
            import vllm_compat
            print(json.dumps(vllm_compat.status()["routes"]), flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    found = [(each["route"], each["inherited"]) for each in json.loads(done.stdout)]
    assert found == [("pth", True), ("import", False)]


def test_the_same_entry_point_twice_is_one(world) -> None:
    entry = "[vllm_compat.patches]\nfakeuser = fakepatches:SET\n"
    world.install("fakecopy", "1.0", entry)
    world.write("fakepatches.egg-info/entry_points.txt", entry)
    world.write("fakepatches.egg-info/PKG-INFO", "Name: fakepatches\nVersion: 1.0\n")
    code = "import vllm_compat, fakeuser.gen as gen; vllm_compat.require(); assert gen.start(1)[0] == 'patched'"
    assert world.run(code).returncode == 0
    world.install("fakecopy", "1.0", entry.replace("fakepatches", "other"))
    assert "two packages bring patches for fakeuser: fakecopy and fakepatches" in world.run(code).stderr.replace(
        "fakepatches and fakecopy", "fakecopy and fakepatches"
    )


def test_a_source_tree_that_hides_the_installed_package(world) -> None:
    """`python -m pytest` in the checkout: the entry point is installed, its module is not in the tree."""
    world.install("vllm_compat", "0.1.0", "[vllm_compat.patches]\nfakeuser = vllm_compat.no_patches_here:SET\n")
    world.install("fakepatches", None)
    done = world.run("import vllm_compat, fakeuser")
    assert done.returncode == 1
    assert "a source tree, where vllm_compat.no_patches_here does not exist" in done.stderr
    assert "`pytest` instead of `python -m pytest`" in done.stderr
