"""The ways by which vllm_compat comes into a process: which of them act in this environment, and why not the others."""

from __future__ import annotations

import json
import os
import site
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from _vllm_compat_startup import finder
from vllm_compat.launch import sitecustomize_dir

DISTRIBUTION = "vllm-compat"
STARTUP = "vllm_compat.start" if sys.version_info >= (3, 15) else "vllm_compat.pth"


@dataclass(frozen=True)
class Route:
    """`live`: it acts in every Python of this environment that is started like this one; None if that is not known."""

    route: str
    live: bool | None
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def routes(target: Path | None = None) -> tuple[Route, ...]:
    """The routes of this process's environment, or of the site-packages folder `target`."""
    found = _distribution(target)
    if found is None:
        where = "" if target is None else f" in {target}"
        return (Route("import", False, f"no installed vllm_compat{where}"),)
    return (
        Route("import", True, f"import vllm_compat, before the consumer ({DISTRIBUTION} {found.version})"),
        _startup(found) if target is None else _startup_of(target),
        _sitecustomize(target),
        *_plugins(found),
    )


def _distribution(target: Path | None) -> metadata.Distribution | None:
    path = sys.path if target is None else [str(target)]
    return next(iter(metadata.distributions(name=DISTRIBUTION, path=path)), None)


def _startup(found: metadata.Distribution) -> Route:
    """Proven by this process: its own start has armed the hook, or has not."""
    if any(route in ("pth", "start") for route, _ in finder().taken):
        return Route("startup", True, f"{STARTUP} acts in every Python of this environment")
    folders = _site_folders()
    files = [folder for folder in folders if (folder / STARTUP).is_file()]
    own = Path(str(found.locate_file("")))
    if sys.flags.no_site:
        text = "this Python was started with -S, which skips start-up files"
    elif files:
        text = f"{files[0] / STARTUP} is there but did not act: install vllm-compat again"
    elif json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        text = "an editable install has no start-up file; install the wheel (pip install .), or use `vllm-compat run`"
    elif own not in folders:
        text = f"Python reads start-up files only in its site-packages, not in {own}; use `vllm-compat run`"
    else:
        text = f"{own / STARTUP} is missing; install vllm-compat again"
    return Route("startup", False, text)


def _startup_of(target: Path) -> Route:
    if not (target / STARTUP).is_file():
        return Route("startup", False, f"no {STARTUP} in {target}: an editable install, or an incomplete one")
    if target.resolve() in _site_folders():
        return Route("startup", True, f"{STARTUP} acts in every Python of this environment")
    if target.name in ("site-packages", "dist-packages"):
        return Route("startup", True, f"{STARTUP} acts in the Python whose site-packages this is")
    return Route("startup", None, f"{STARTUP} is there; Python reads it only if the folder is one of its site-packages")


def _site_folders() -> list[Path]:
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder).resolve() for folder in folders]


def _sitecustomize(target: Path | None) -> Route:
    folder = sitecustomize_dir()
    if target is not None:
        folder = target / "vllm_compat" / folder.name
        there = (folder / "sitecustomize.py").is_file()
        return Route("sitecustomize", None if there else False, f"{folder} {'can be put' if there else 'is not'} there")
    if any(route in ("sitecustomize", "run") for route, _ in finder().taken):
        return Route("sitecustomize", True, f"{folder} is on PYTHONPATH")
    if str(folder) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        text = 'use `vllm-compat run`, or export PYTHONPATH="$(vllm-compat sitecustomize-dir):$PYTHONPATH"'
    elif sys.flags.ignore_environment or sys.flags.no_site:
        text = "PYTHONPATH names it, but this Python was started with -I, -E or -S"
    else:
        text = f"PYTHONPATH names it, but another sitecustomize comes before it: put {folder} first"
    return Route("sitecustomize", False, text)


def _plugins(found: metadata.Distribution) -> list[Route]:
    """The runtime's own plugin mechanism leads to the hook too."""
    ours = (each for each in found.entry_points if each.value.startswith("_vllm_compat_startup:"))
    return [Route("plugin", True, f"{each.group}: {each.name}, called in each process of the runtime") for each in ours]
