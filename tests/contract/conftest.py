"""The contract with every release: see `test_contract.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .contract import Contract, Release, newer_on_the_index, refresh
from .targets import RUNTIME
from .wheels import Unread

SOURCES = "VLLM_COMPAT_SOURCES"
contract_key = pytest.StashKey[Contract]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contract with every release")
    group.addoption("--refresh", action="store_true", help="take new releases in, write the fingerprints anew")
    group.addoption(
        "--newer", action="store_true", help="look at releases on the index that the list does not have, too"
    )
    group.addoption("--wheel", action="append", default=[], help="look at this vLLM too: ==release, path or address")
    group.addoption("--release", action="append", default=[], help="of the listed vLLM releases, only this one")


def pytest_configure(config: pytest.Config) -> None:
    cache = Path(os.environ.get(SOURCES) or config.cache.mkdir("sources"))
    # Without defaults, a run that finds this folder only while collecting would not know the options.
    if config.getoption("refresh", False):
        print("\n".join(refresh(cache) or ["nothing changed"]))
    extra = list(config.getoption("wheel", []))
    if config.getoption("newer", False):
        extra += [wheel for _, wheel in newer_on_the_index()]
    config.stash[contract_key] = Contract(cache, extra, config.getoption("release", []))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each release of the runtime, or for each name in any release that patches build on."""
    releases = metafunc.config.stash[contract_key].releases
    if "name" in metafunc.fixturenames:
        cases = [(release, name) for release in releases for name in release.names]
        ids = [f"{release.package}-{release.version}-{'.'.join(name)}" for release, name in cases]
        metafunc.parametrize(("release", "name"), cases, ids=ids, indirect=["release"])
    elif "runtime" in metafunc.fixturenames:
        runtimes = [release for release in releases if release.package == RUNTIME]
        metafunc.parametrize("release", runtimes, ids=lambda each: f"{each.package}-{each.version}", indirect=True)


@pytest.fixture(scope="session")
def contract(pytestconfig: pytest.Config) -> Contract:
    """All releases, read. An error in one of them is raised by its own tests."""
    contract = pytestconfig.stash[contract_key]
    contract.read(contract.releases)
    return contract


@pytest.fixture
def release(request: pytest.FixtureRequest, contract: Contract) -> Release:
    release: Release = request.param
    if isinstance(release.error, Unread):
        pytest.fail(str(release.error), pytrace=False)
    if release.error is not None:
        raise release.error
    return release


@pytest.fixture
def runtime(release: Release) -> Release:
    return release
