"""Activation, undo, switches and errors, each in its own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Check = Callable[..., str]
PLAIN = """
    import fakeuser.gen as gen, fakerun.core as core
    assert gen.start is core.start
    assert gen.Gen().generate("p") == ["p", ("runtime", 1)]
"""
PATCHED = """
    import fakeuser.gen as gen, fakerun.core as core, fakeuser.other as other
    assert gen.start(1) == ("patched", ("runtime", 1)), gen.start
    assert gen.Gen().generate("p") == ["patched", "p", ("patched", ("runtime", 1))]
    assert other.VALUE == "patched other"
    assert core.start(1) == ("runtime", 1)
    import vllm_compat; vllm_compat.require()
"""
AMBIENT = """
    import importlib.util, os, vllm_compat_file as startup
    startup.arm(["fakeuser"], "pth")
"""


@pytest.fixture
def ambient(world) -> None:
    """Another copy of the start-up hook, as a second installation would bring it."""
    (world.site / "vllm_compat_file.py").symlink_to(world.engine / "_vllm_compat_startup" / "__init__.py")


def test_import_first(check: Check) -> None:
    assert check("import vllm_compat", PATCHED) == ""


def test_consumer_first(check: Check) -> None:
    assert check(PLAIN, "import vllm_compat", PATCHED) == ""


def test_ambient_says_one_line(check: Check, ambient: None) -> None:
    line = "fakeuser 0.3.0 on fakerun 2.1.0: 2 patches apply, 1 not needed (vllm-compat plan)\n"
    line = f"vllm_compat 0.1.0: {line}"
    assert check(AMBIENT, PATCHED) == line
    assert check(AMBIENT, PATCHED, VLLM_COMPAT_LOG="warning") == ""
    assert check("import vllm_compat", PATCHED, VLLM_COMPAT_LOG="info") == line


def test_ambient_hook_does_not_wake_for_a_look(check: Check, ambient: None) -> None:
    code = """
    import sys
    spec = importlib.util.find_spec("fakeuser")
    assert spec.loader.get_source("fakeuser") == ""
    assert "vllm_compat" not in sys.modules
    import fakeuser
    assert "vllm_compat" in sys.modules
    assert type(fakeuser.__loader__).__name__ == "SourceFileLoader" == type(fakeuser.__spec__.loader).__name__
    """
    check(AMBIENT, code)


def test_undo_restores_by_identity_and_stays_off(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    assert vllm_compat.deactivate() == ()
    assert gen.start is core.start and other.VALUE == "plain"
    assert vllm_compat.status()["patches"] == [] and not vllm_compat.status()["active"]
    try: vllm_compat.require()
    except vllm_compat.CompatError as error: assert "deactivate() was called" in str(error)
    else: assert False
    import sys
    for name in [name for name in sys.modules if name.startswith("fakeuser")]: del sys.modules[name]
    """,
        PLAIN,
        "    vllm_compat.activate()",
        PATCHED,
    )


def test_twice_is_once(check: Check) -> None:
    check(
        "import vllm_compat; vllm_compat.activate()",
        PATCHED,
        """
    start = gen.start
    for _ in range(3): vllm_compat.activate("explicit")
    assert gen.start is start
    assert len(vllm_compat.status()["patches"]) == 3
    """,
        PATCHED,
    )


def test_reimport_and_reload_are_patched_again(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    import importlib, sys
    importlib.reload(gen)
    """,
        PATCHED,
        """
    assert len(vllm_compat.status()["patches"]) == 3
    for name in [name for name in sys.modules if name.startswith("fakeuser")]: del sys.modules[name]
    """,
        PATCHED,
        """
    assert vllm_compat.deactivate() == ()
    assert gen.start is core.start
    """,
    )


def test_somebody_elses_wrapper_is_left_and_named(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    import functools
    ours = gen.start
    @functools.wraps(ours)
    def theirs(*args): return ours(*args)
    gen.start = theirs
    vllm_compat.require()
    left = vllm_compat.deactivate()
    assert left == ("start: fakeuser.gen.start (changed by somebody else since)",), left
    assert gen.start is theirs
    vllm_compat.activate()
    assert gen.start is theirs and gen.start(1) == ("patched", ("runtime", 1))
    gen.start = ours
    assert vllm_compat.deactivate() == ()
    assert gen.start is core.start
    """,
    )


def test_require_notices_a_lost_patch(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    gen.start = core.start
    try: vllm_compat.require()
    except vllm_compat.CompatError as error: assert "start: fakeuser.gen.start is not in place" in str(error)
    else: assert False
    """,
    )


def test_off(check: Check, ambient: None) -> None:
    code = """
    import vllm_compat
    assert vllm_compat.status()["reason"] == "VLLM_COMPAT=0"
    try: vllm_compat.require()
    except vllm_compat.CompatError as error: assert "VLLM_COMPAT=0" in str(error)
    else: assert False
    """
    assert check(code, PLAIN, VLLM_COMPAT="0") == ""
    assert check(AMBIENT, PLAIN, code.replace('["reason"]', '["consumers"][0]["reason"]'), VLLM_COMPAT="0") == ""


def test_switches_are_read_at_the_import_of_the_consumer(check: Check) -> None:
    check("import vllm_compat, os; os.environ['VLLM_COMPAT'] = '0'", PLAIN)


REFUSED = """
    import sys, vllm_compat
    for _ in range(2):
        try: import fakeuser
        except vllm_compat.CompatError as error: text = str(error)
        else: assert False
        assert "fakeuser" not in sys.modules
    try: vllm_compat.require()
    except vllm_compat.CompatError: pass
    else: assert False
    print(text, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("distribution", "version", "wanted"),
    [
        ("fakeuser", "0.2.9", "fakeuser 0.2.9 is not supported, only >=0.3,<0.4"),
        ("fakerun", "1.9", "fakerun 1.9 is not supported, only >=2"),
        ("fakerun", "0.1.dev1+gabc", "fakerun reports '0.1.dev1+gabc', a source build without tags"),
        ("fakerun", "dev", "fakerun reports 'dev', which is no version"),
        (
            "fakerun",
            None,
            "fakerun (distribution fakerun-gpu or fakerun) has no package metadata, only source in",
        ),
    ],
)
def test_bad_pair(world, check: Check, ambient: None, distribution: str, version: str | None, wanted: str) -> None:
    world.install(distribution, version)
    text = check(REFUSED)
    assert wanted in text
    assert "package   found" in text
    assert ">=0.3,<0.4" in text
    line = check(AMBIENT, PLAIN)
    assert line.count("\n") == 1
    assert line.startswith("vllm_compat 0.1.0: fakeuser is left unpatched: ")
    assert wanted in line


def test_late_refusal_names_the_problem(world, check: Check) -> None:
    world.install("fakerun", "1.9")
    check(
        PLAIN,
        """
    try: import vllm_compat
    except RuntimeError as error: assert "fakerun 1.9 is not supported" in str(error)
    else: assert False
    assert gen.start is core.start
    """,
    )


def test_misfit(world, check: Check, ambient: None) -> None:
    world.write("fakerun/core.py", "class Engine: pass\ndef start(config): return ('runtime', config)")
    wanted = "start: fakerun.core.start: expected a function with config, blocks, found a function (config)"
    assert wanted in check(REFUSED)
    assert wanted in check(AMBIENT, PLAIN)


def test_a_fact_of_some_releases_is_asked_there_only(world, check: Check) -> None:
    world.install("fakerun", "2.8.0")
    check("import vllm_compat", PATCHED)
    world.install("fakerun", "2.9.0")
    wanted = "start: fakerun.core.finish: expected"
    assert wanted in check(REFUSED)
    world.write("fakerun/core.py", (world.site / "fakerun/core.py").read_text() + "def finish(): ...")
    check("import vllm_compat", PATCHED)


def test_newer_runtime_is_tried_with_one_warning(world, check: Check, ambient: None) -> None:
    world.install("fakerun", "2.7.0rc1.dev3+gabc")
    line = check("import vllm_compat", PATCHED)
    assert line.count("\n") == 1
    assert "fakerun 2.7.0rc1.dev3+gabc is newer than 2.1.0" in line
    assert "VLLM_COMPAT_STRICT" in check(REFUSED, VLLM_COMPAT_STRICT="1")


def test_strict_refuses_what_is_not_proven_or_left_out(world, check: Check) -> None:
    assert "generate is left out" in check(REFUSED, VLLM_COMPAT_STRICT="1", VLLM_COMPAT_DISABLE="generate")
    world.install("fakerun", "2.0.5")
    check("import vllm_compat", PATCHED)
    assert "no real run has proven it" in check(REFUSED, VLLM_COMPAT_STRICT="1")


def test_disable(check: Check) -> None:
    code = """
    import vllm_compat, fakeuser.gen as gen
    assert gen.start(1) == ("patched", ("runtime", 1))
    assert gen.Gen().generate("p") == ["p", ("patched", ("runtime", 1))]
    vllm_compat.require()
    """
    check(code, VLLM_COMPAT_DISABLE="generate")
    assert "'genrate', which is no patch: did you mean 'generate'?" in check(REFUSED, VLLM_COMPAT_DISABLE="genrate")


def test_failing_change_takes_everything_back(check: Check, ambient: None) -> None:
    code = """
    import sys, vllm_compat, fakeuser.gen as gen, fakerun.core as core
    assert gen.start is not core.start
    for _ in range(2):
        try: import fakeuser.other
        except vllm_compat.PatchError as error: assert "generate: fakeuser.other.VALUE" in str(error)
        else: assert False
        assert "fakeuser.other" not in sys.modules
        assert gen.start is core.start
    assert vllm_compat.status()["consumers"][0]["state"] == "failed"
    assert vllm_compat.status()["patches"] == []
    del os.environ["FAKE_BREAK"]
    vllm_compat.activate()
    """
    check("import os", code, PATCHED, FAKE_BREAK="1")
    lines = check(AMBIENT, "    import fakeuser.gen, fakeuser.other", PLAIN, FAKE_BREAK="1").splitlines()
    assert len(lines) == 2
    assert "left unpatched: generate: fakeuser.other.VALUE could not be replaced: ValueError" in lines[1]


LENT = """
    import fakerun.core, sys
    import fakeuser.borrower
    assert fakeuser.borrower.old_name == "lent"
    assert not hasattr(fakerun.core, "old_name")
    import vllm_compat
    assert [each["target"] for each in vllm_compat.status()["patches"] if each["patch"] == "loan"] == [
        "fakerun.core.old_name"
    ]
    vllm_compat.require()
    """


def test_a_name_is_lent_for_one_import_and_taken_back(world, check: Check, ambient: None) -> None:
    with_loan = {"FAKE_LOAN": "1"}
    assert "cannot import name 'old_name'" in world.run("import fakeuser.borrower").stderr
    check("import vllm_compat", LENT, **with_loan)
    check(AMBIENT, LENT, **with_loan)
    # Late, and once more: the consumer's other modules are here, this one is imported now, and again.
    check("import fakeuser.gen, vllm_compat", LENT, "del sys.modules['fakeuser.borrower']", LENT, **with_loan)
    undone = """
    import fakeuser.borrower, fakerun.core, sys, vllm_compat
    vllm_compat.deactivate()
    assert vllm_compat.status()["patches"] == []
    del sys.modules["fakeuser.borrower"]
    try: import fakeuser.borrower
    except ImportError: assert not hasattr(fakerun.core, "old_name")
    else: assert False
    """
    check("import vllm_compat", undone, **with_loan)


def test_a_loan_ends_also_where_the_import_fails(world, check: Check) -> None:
    world.write("fakeuser/borrower.py", "from fakerun.core import old_name\n1/0")
    code = """
    import fakerun.core, vllm_compat
    try: import fakeuser.borrower
    except ZeroDivisionError: assert not hasattr(fakerun.core, "old_name")
    else: assert False
    """
    check(code, FAKE_LOAN="1")


def test_a_loan_that_cannot_be_made(world, check: Check, ambient: None) -> None:
    broken = {"FAKE_LOAN": "1", "FAKE_BREAK_LOAN": "1"}
    code = """
    import vllm_compat, fakeuser.gen, fakerun.core
    for _ in range(2):
        try: import fakeuser.borrower
        except vllm_compat.PatchError as error:
            assert "loan: fakerun.core.old_name could not be lent: ValueError: broken loan" in str(error)
        else: assert False
        assert fakeuser.gen.start is fakerun.core.start
    """
    check(code, **broken)
    said = world.run(AMBIENT, "    import fakeuser.borrower", **broken).stderr
    assert "left unpatched: loan: fakerun.core.old_name could not be lent: ValueError: broken loan" in said
    assert "cannot import name 'old_name'" in said


def test_no_patches_installed_is_said(world, check: Check) -> None:
    world.install("fakepatches", None)
    assert "no installed package brings patches" in check("import vllm_compat", PLAIN)


def test_broken_patch_package_never_breaks_ambient(world, check: Check, ambient: None) -> None:
    world.write("fakepatches/__init__.py", "1/0")
    line = check(AMBIENT, PLAIN)
    assert line.count("\n") == 1
    assert "ZeroDivisionError" in line
    assert "ZeroDivisionError" in check(REFUSED)


def test_missing_engine_never_breaks_ambient(world, check: Check, ambient: None) -> None:
    world.write("vllm_compat/__init__.py", "raise ImportError('half removed')")
    line = check(AMBIENT, PLAIN)
    assert line == "vllm_compat: fakeuser is left unpatched: ImportError: half removed\n"


def test_fork_keeps_the_ledger(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    import os
    from vllm_compat import ledger
    ledger.add_worker({"pid": 7})
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = vllm_compat.status()
        good = status["pid"] == os.getpid() and status["workers"] == []
        good = good and all(e["pid"] == parent and e["inherited"] for e in status["patches"])
        vllm_compat.require()
        good = good and vllm_compat.deactivate() == () and gen.start is core.start
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert vllm_compat.status()["workers"] == [{"pid": 7}]
    assert [e["order"] for e in vllm_compat.status()["patches"]] == [1, 2, 3]
    vllm_compat.require()
    """,
    )


def test_threads_importing_at_once(world, check: Check) -> None:
    world.write("fakeuser/gen.py", "import time; time.sleep(0.05)\n" + (world.site / "fakeuser/gen.py").read_text())
    code = """
    import threading, importlib, sys
    sys.setswitchinterval(1e-5)
    failed = []
    def work(number):
        try:
            if number % 2:
                import vllm_compat
                vllm_compat.activate()
            importlib.import_module(["fakeuser.gen", "fakeuser.other", "fakeuser"][number % 3])
        except BaseException as error:
            failed.append(error)
    import vllm_compat
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for each in threads: each.start()
    for each in threads: each.join(20)
    assert not failed and not any(each.is_alive() for each in threads), failed
    """
    check(code, PATCHED, "    assert vllm_compat.deactivate() == () and gen.start is core.start")


def test_status_is_plain_data(check: Check) -> None:
    check(
        "import vllm_compat",
        PATCHED,
        """
    import json
    status = json.loads(json.dumps(vllm_compat.status()))
    assert status["active"] and status["route"] == "import" and status["version"] == vllm_compat.__version__
    assert status["consumers"][0]["versions"] == {"fakeuser": "0.3.0", "fakerun": "2.1.0"}
    assert [e["target"] for e in status["patches"]][:2] == ["fakeuser.gen.start", "fakeuser.gen.Gen.generate"]
    """,
    )
