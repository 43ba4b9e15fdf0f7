"""`vllm-compat doctor` in the fake world, and the checks that our own patch set brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_compat
from vllm_compat.patches import SPECULATORS, preflight
from vllm_compat.registry import Surroundings

CHECKS = """
import dataclasses
from vllm_compat.registry import *

def lamp(here):
    yield Finding(status="ok", text=f"{here.options['bulbs']} bulbs, {here.versions['fakerun']}, {len(here.path)}")
    if here.environ.get("FAKE_DARK"):
        yield Finding(status="problem", text="it is dark", advice="make light")

def broken(here): raise ValueError("no answer")

SET = dataclasses.replace(
    SET,
    known_bad=(KnownBad(ranges={"fakerun": "==2.0.0", "fakeuser": ">=0.3"}, symptom="they quarrel", advice="part"),),
    checks=(Check(name="lamp", run=lamp), Check(name="broken", run=broken)),
    options=(Option(name="bulbs", default=3, help="how many"), Option(name="room", default=None, help="which")),
)
"""


@pytest.fixture
def doctor(world) -> Any:
    with (world.site / "fakepatches" / "__init__.py").open("a") as file:
        file.write(CHECKS)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        arguments = ("doctor", *arguments)
        return world.run(f"import sys, vllm_compat.cli as cli; sys.exit(cli.main({list(arguments)!r}))", **env)

    return run


def found(done: subprocess.CompletedProcess[str], check: str) -> list[tuple[str, str]]:
    findings = json.loads(done.stdout)["findings"]
    return [(each["status"], each["text"]) for each in findings if each["check"] == check]


def test_checks_of_the_patch_set(doctor) -> None:
    done = doctor("--json")
    assert found(done, "lamp")[0][1].startswith("3 bulbs, 2.1.0")
    assert found(done, "broken") == [("warning", "could not be checked: ValueError: no answer")]
    assert found(doctor("--json", "--bulbs", "5"), "lamp")[0][1].startswith("5 bulbs")
    assert doctor("--bulbs", "many").returncode == 2
    assert "which" in doctor("--help").stdout
    dark = doctor(FAKE_DARK="1")
    assert dark.returncode == 1
    assert "  problem   lamp: it is dark\n            make light\n" in dark.stdout


def test_known_bad_pairs_are_data(doctor, world) -> None:
    assert found(doctor("--json"), "packages") == [("ok", "what the packages demand of each other is met")]
    world.install("fakerun", "2.0.0+cpu")
    done = doctor("--json")
    assert json.loads(done.stdout)["plans"][0]["problems"] == [
        "fakerun 2.0.0+cpu with fakeuser 0.3.0: they quarrel; part"
    ]
    assert done.returncode == 1


def test_what_packages_demand_of_each_other(doctor, world) -> None:
    file = world.site / "fakeuser-0.3.0.dist-info" / "METADATA"
    file.write_text(
        "Name: fakeuser\nVersion: 0.3.0\nRequires-Dist: FakeRun_GPU==2.1.0+cpu\nRequires-Dist: not a requirement !\n"
        'Requires-Dist: fakerun<2; extra == "old"\nRequires-Dist: numpy>99\n\nRequires-Dist: fakerun<1\n'
    )
    assert found(doctor("--json"), "packages") == [("ok", "what the packages demand of each other is met")]
    file.write_text("Name: fakeuser\nVersion: 0.3.0\nRequires-Dist: fakerun<2\n")
    text = "fakeuser 0.3.0 wants fakerun<2, 2.1.0 is installed"
    assert found(doctor("--json"), "packages") == [("warning", text)]


def test_schema(doctor) -> None:
    """The fields that docs/json.md promises."""
    answer = json.loads(doctor("--json").stdout)
    assert answer["schema"] == 1
    fields = {"schema", "ok", "version", "target", "python", "platform", "plans", "routes", "findings", "seconds"}
    assert set(answer) == fields
    assert set(answer["findings"][0]) == {"check", "status", "text", "advice"}
    words = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    for field in fields | set(answer["plans"][0]) | set(answer["plans"][0]["decisions"][0]):
        assert f"`{field}`" in words, field
    assert set(answer["plans"][0]["packages"][0]) == {
        *("module", "distributions", "version", "release", "supported", "status", "problem")
    }


def test_imports_neither_consumer_nor_runtime(doctor, world) -> None:
    code = """
    import sys, vllm_compat.cli as cli
    cli.main(["doctor", "--json"])
    print(sorted({"fakeuser", "fakerun"} & set(sys.modules)), file=sys.stderr)
    """
    assert world.run(code).stderr.splitlines()[-1] == "[]"


def test_our_own_installation(doctor, world) -> None:
    assert found(doctor("--json"), "install")[0][0] == "problem"  # a source tree, not installed
    world.install("vllm_compat", "0.0.9")
    assert "two installations are mixed" in doctor().stdout
    world.install("vllm_compat", vllm_compat.__version__)
    assert found(doctor("--json"), "install")[0][0] == "ok"
    info = f"vllm_compat-{vllm_compat.__version__}.dist-info/METADATA"
    head = f"Name: vllm-compat\nVersion: {vllm_compat.__version__}\n"
    world.write(info, head + 'Requires-Dist: pytest>=99; extra == "test"\nRequires-Dist: fakerun<2\n')
    text = "vllm_compat needs fakerun<2, 2.1.0 is installed"
    assert found(doctor("--json"), "install") == [("problem", text)]


def test_no_patches(world) -> None:
    world.install("fakepatches", None)
    done = world.run("import sys, vllm_compat.cli as cli; sys.exit(cli.main(['doctor']))")
    assert done.returncode == 1
    assert "no patches are installed" in done.stdout


ROUTES = "import json; from vllm_compat.routes import routes; print(json.dumps([each.as_dict() for each in routes()]))"


@pytest.mark.parametrize(
    ("url", "folder", "text"),
    [
        ('{"dir_info": {"editable": true}}', "", "an editable install has no start-up file"),
        ("{}", "", "Python reads start-up files only in its site-packages, not in"),
    ],
)
def test_why_the_start_up_file_does_not_act(world, url: str, folder: str, text: str) -> None:
    world.install("vllm_compat", "0.1.0")
    world.write("vllm_compat-0.1.0.dist-info/direct_url.json", url)
    code = ROUTES.replace("routes()]", "routes()]").replace("import json", "import json, sys")
    done = world.run(
        "import sys, vllm_compat.routes as r; r.sys = type('S', (), {'flags': type('F', (), {'no_site': 0, "
        "'ignore_environment': 0}), 'path': sys.path})",
        code,
    )
    (startup,) = [each for each in json.loads(done.stdout) if each["route"] == "startup"]
    assert startup["live"] is False
    assert text in startup["text"]


def test_routes_of_another_environment(world, tmp_path: Path) -> None:
    other = tmp_path / "lib" / "site-packages"
    (other / "vllm_compat-0.1.0.dist-info").mkdir(parents=True)
    (other / "vllm_compat-0.1.0.dist-info" / "METADATA").write_text("Name: vllm-compat\nVersion: 0.1.0\n")
    code = ROUTES.replace("routes()]", f"routes(Path({str(other)!r}))]").replace(
        "import json", "import json; from pathlib import Path"
    )

    def startup() -> dict[str, Any]:
        answer: dict[str, Any] = {each["route"]: each for each in json.loads(world.run(code).stdout)}["startup"]
        return answer

    assert startup()["live"] is False
    for name in ("vllm_compat.pth", "vllm_compat.start"):
        (other / name).write_text("")
    assert startup()["live"] is True
    plain = tmp_path / "target"
    other.rename(plain)
    code = code.replace(str(other), str(plain))
    assert startup()["live"] is None


# Our own patch set's checks.


def surroundings(**given: Any) -> Surroundings:
    options = {option.name: option.default for option in SPECULATORS.options}
    options |= {name.replace("_", "-"): value for name, value in given.pop("options", {}).items()}
    values: dict[str, Any] = {"environ": {}, "versions": {"vllm": "0.16.0+cpu"}, "options": options, "path": ()}
    return Surroundings(**{**values, **given})


def statuses(check: Any, **given: Any) -> list[str]:
    return [each.status for each in check(surroundings(**given))]


def test_start_method() -> None:
    name = preflight.START_METHOD
    for value, status in {None: "ok", "spawn": "ok", "fork": "warning", "thread": "problem"}.items():
        environ = {} if value is None else {name: value}
        assert statuses(preflight.check_start_method, environ=environ) == [status]


def test_plugins_left_out() -> None:
    assert statuses(preflight.check_plugins) == []
    assert statuses(preflight.check_plugins, environ={"VLLM_PLUGINS": "a,vllm_compat"}) == []
    assert statuses(preflight.check_plugins, environ={"VLLM_PLUGINS": ""}) == ["note"]


def test_memory_for_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free_memory", lambda: (2**30, "of a test"))
    (finding,) = preflight.check_batch(surroundings())
    assert finding.status == "problem"
    assert "takes 896 MiB of memfd" in finding.text
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 1024, "dtype": "float32"}}')
    (finding,) = preflight.check_batch(surroundings(options={"model": str(tmp_path), "batch_size": 2, "layers": 3}))
    assert (finding.status, "takes 48 MiB" in finding.text) == ("ok", True)
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": "x"}, "torch_dtype": "float32"}')
    (finding,) = preflight.check_batch(surroundings(options={"model": str(tmp_path)}))
    assert f"4 layers of 7168 x 4 bytes (a wide model; {tmp_path / 'config.json'} has no hidden_size)" in finding.text


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "[" * 100_000])
def test_a_model_whose_configuration_is_broken_is_not_ready(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (finding,) = preflight.check_batch(surroundings(options={"model": str(tmp_path)}))
    assert finding.status == "problem"
    assert str(tmp_path / "config.json") in finding.text


@pytest.mark.parametrize("model", ["", "none", "a" * 300])
def test_a_model_that_is_not_there_is_not_ready(tmp_path: Path, model: str) -> None:
    here = surroundings(options={"model": model}, environ={"HF_HOME": str(tmp_path)})
    assert [finding.status for finding in preflight.check_batch(here)] == ["problem"]


def test_shared_memory_of_the_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room:
        f_frsize, f_bavail = 1, 64 * 2**20

    monkeypatch.setattr(os, "statvfs", lambda path: Room)
    assert statuses(preflight.check_queues) == ["warning"]
    Room.f_bavail = 2**30
    assert statuses(preflight.check_queues) == ["ok"]
    assert statuses(preflight.check_queues, options={"tensor_parallel_size": 8}) == ["note"]
    assert (
        "use at most 640 MiB"
        in next(iter(preflight.check_queues(surroundings(options={"tensor_parallel_size": 2})))).text
    )


def test_settings_of_the_cpu_build() -> None:
    assert statuses(preflight.check_cpu_build, versions={"vllm": "0.16.0"}) == []
    one = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert statuses(preflight.check_cpu_build, environ=one) == []
    many = {"options": {"tensor_parallel_size": 64}, "environ": {**one, "VLLM_CPU_KVCACHE_SPACE": "0"}}
    assert statuses(preflight.check_cpu_build, **many) == ["problem"]
    many["environ"]["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    assert statuses(preflight.check_cpu_build, **many) == []
    older = {"environ": one, "versions": {"vllm": "0.18.1+cpu"}}
    assert statuses(preflight.check_cpu_build, **older) == ["problem"]
    one["LD_PRELOAD"] = "libtcmalloc_minimal.so.4"
    assert statuses(preflight.check_cpu_build, **older) == []
    for space in ("1000000", "four"):
        assert statuses(preflight.check_cpu_build, environ={"VLLM_CPU_KVCACHE_SPACE": space}) == ["problem"]


def test_known_bad_pairs_do_not_hit_the_proven_ones() -> None:
    from vllm_compat.versions import matches, release_of

    proven = {"speculators": "0.3.0", "vllm": "0.16.0", "torch": "2.10.0+cpu", "transformers": "4.57.6"}
    for bad in SPECULATORS.known_bad:
        assert not all(matches(release_of(proven[name]), text) for name, text in bad.ranges.items())
        assert bad.symptom
        assert bad.advice


def test_doctor_loads_no_heavy_module(tmp_path: Path) -> None:
    code = """
import sys, vllm_compat.cli as cli
cli.main(["doctor"])
print(sorted({"torch", "vllm", "speculators", "transformers", "numpy", "psutil"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert "message queues" in done.stdout
