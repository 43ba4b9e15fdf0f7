"""Every order of importing, activating by each route, undoing and importing again, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

DRIVER = '''
import importlib, importlib.util, itertools, os, signal, sys, traceback

PLAIN = ("consumer", "runtime", "activate", "deactivate", "reimport")
ROUTES = ("import", "pth", "start", "plugin", "sitecustomize", "copy")


def orders():
    """Each route among the plain steps up to length four; all of them mixed up to length three."""
    seen = set()
    for route in ROUTES:
        for length in range(1, 5):
            seen.update(itertools.product((*PLAIN, route), repeat=length))
    for length in range(1, 4):
        seen.update(itertools.product((*PLAIN, *ROUTES), repeat=length))
    return sorted(seen)


class Model:
    """What should be true."""

    loaded = engine = armed = active = declined = False

    def step(self, name):
        if name == "activate" or (name == "import" and not self.engine):
            self.engine, self.declined = True, False
            self.active, self.armed = self.active or self.loaded, self.armed or not self.loaded
        elif name in ROUTES and name != "import":
            self.armed = self.armed or not self.declined
        elif name == "deactivate" and self.engine:
            self.armed = self.active = False
            self.declined = True
        elif name in ("consumer", "reimport"):
            if self.armed and (name == "reimport" or not self.loaded):
                self.armed, self.active, self.engine = False, True, True
            self.loaded = True


def do(name):
    if name == "consumer":
        import fakeuser.gen
    elif name == "runtime":
        import fakerun.core
    elif name == "activate":
        import vllm_compat
        vllm_compat.activate("explicit")
    elif name == "import":
        import vllm_compat
    elif name == "pth":
        exec(PTH)
    elif name == "sitecustomize":
        spec = importlib.util.spec_from_file_location("sitecustomize", AMBIENT)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    elif name in ("start", "plugin"):
        import _vllm_compat_startup
        getattr(_vllm_compat_startup, name + "_fakeuser")()
    elif name == "copy":
        import vllm_compat_file
        vllm_compat_file.arm(["fakeuser"], "pth")
    elif name == "deactivate":
        if "vllm_compat" in sys.modules:
            assert sys.modules["vllm_compat"].deactivate() == ()
    else:
        for module in [module for module in sys.modules if module.startswith("fakeuser")]:
            del sys.modules[module]
        import fakeuser.gen


def check(model):
    assert sum(getattr(each, "is_vllm_compat", False) for each in sys.meta_path) <= 1
    assert ("vllm_compat" in sys.modules) == model.engine
    if model.loaded:
        gen, core = sys.modules["fakeuser.gen"], sys.modules["fakerun.core"]
        assert core.start.__module__ == "fakerun.core" and core.start(1) == ("runtime", 1)
        if model.active:
            assert gen.start(1) == ("patched", ("runtime", 1)), "not patched"
            assert gen.Gen().generate(0) == ["patched", 0, ("patched", ("runtime", 1))]
            sys.modules["vllm_compat"].require()
        else:
            assert gen.start is core.start, "patched"
            assert gen.Gen().generate(0) == [0, ("runtime", 1)]


def stuck(*_):
    raise TimeoutError("stuck")


def run(steps):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    model = Model()
    signal.signal(signal.SIGALRM, stuck)
    signal.alarm(60)
    try:
        for step in steps:
            do(step)
            model.step(step)
            check(model)
    except BaseException as error:
        print(steps, type(error).__name__, error, traceback.format_exc(), flush=True)
        os._exit(1)
    os._exit(0)


failed = running = 0
all_orders = orders()
for steps in all_orders:
    if running == (os.cpu_count() or 1):
        failed += os.wait()[1] != 0
        running -= 1
    running += 1
    if os.fork() == 0:
        run(steps)
for _ in range(running):
    failed += os.wait()[1] != 0
print(len(all_orders), "orders", failed, "failed")
sys.exit(bool(failed))
'''


def test_every_order(world) -> None:
    world.patience = 1200  # thousands of processes: under a minute on two free cores
    (world.site / "vllm_compat_file.py").symlink_to(world.engine / "_vllm_compat_startup" / "__init__.py")
    line = (
        (Path(__file__).parents[2] / "_vllm_compat_startup" / "vllm_compat.pth")
        .read_text()
        .replace("speculators", "fakeuser")
    )
    sitecustomize = world.engine / "vllm_compat" / "ambient" / "sitecustomize.py"
    # What the engine needs anyway is there before the forks, so that a case costs milliseconds.
    done = world.run(
        "import packaging.specifiers, importlib.metadata, dataclasses, logging, ast, inspect, difflib",
        f"PTH, AMBIENT = {line!r}, {str(sitecustomize)!r}",
        DRIVER,
        PYTHONPYCACHEPREFIX=str(world.site.parent / "bytecode"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.endswith("orders 0 failed\n")
