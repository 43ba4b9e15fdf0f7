"""Every order of importing, activating, undoing and importing again, each in a process of its own."""

from __future__ import annotations

DRIVER = '''
import importlib, itertools, os, sys

STEPS = ("consumer", "runtime", "activate", "ambient", "deactivate", "reimport")
LENGTH = 4


class Model:
    """What should be true."""

    loaded = engine = armed = active = False

    def step(self, name):
        if name == "activate":
            self.engine = True
            self.active, self.armed = self.active or self.loaded, self.armed or not self.loaded
        elif name == "ambient":
            self.armed = True
        elif name == "deactivate" and self.engine:
            self.armed = self.active = False
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
    elif name == "ambient":
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


failed = count = 0
for length in range(1, LENGTH + 1):
    for steps in itertools.product(STEPS, repeat=length):
        count += 1
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                model = Model()
                for step in steps:
                    do(step)
                    model.step(step)
                    check(model)
            except BaseException as error:
                print(steps, type(error).__name__, error, flush=True)
                os._exit(1)
            os._exit(0)
        failed += os.wait()[1] != 0
print(count, "orders", failed, "failed")
sys.exit(bool(failed))
'''


def test_every_order(world) -> None:
    (world.site / "vllm_compat_file.py").symlink_to(world.engine / "vllm_compat" / "_startup.py")
    # What the engine needs anyway is there before the forks, so that a case costs milliseconds.
    done = world.run(
        "import packaging.specifiers, importlib.metadata, dataclasses, logging, ast, inspect, difflib",
        DRIVER,
        PYTHONPYCACHEPREFIX=str(world.site.parent / "bytecode"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.endswith("1554 orders 0 failed\n")
