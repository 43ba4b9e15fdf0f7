"""`vllm-compat run`: a Python whose start waits for the consumers, where the installed start-up file cannot act."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_compat.discovery import entry_points
from vllm_compat.errors import CompatError


def sitecustomize_dir() -> Path:
    """The folder to put on PYTHONPATH; its sitecustomize also runs the user's own."""
    return Path(__file__).resolve().parent / "ambient"


def environment() -> dict[str, str]:
    """This process's environment with the folder first on PYTHONPATH, and a mark that a person asked for it.

    The mark is for the first Python only: it takes it away, and its children are patched without being asked.
    """
    folder = str(sitecustomize_dir())
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *others]), "VLLM_COMPAT_RUN": "1"}


def run(script: str, arguments: Sequence[str], *, module: bool) -> None:
    """Replaces this process by `python SCRIPT ARGUMENTS` (or `python -m`); does not return.

    Raises CompatError where that Python would not find vllm_compat.
    """
    # The script's own folder, not the current one, is first on the path of that Python.
    path = sys.path if "" not in sys.path[:1] and os.getcwd() not in sys.path[:1] else sys.path[1:]
    if not any(each.find_spec("vllm_compat", path) for each in sys.meta_path if hasattr(each, "find_spec")):
        raise CompatError(
            f"vllm_compat is found only in the current folder, {os.getcwd()}, and the script would not find it: "
            "install it, or put the folder it is installed in on PYTHONPATH"
        )
    if not entry_points():
        raise CompatError("no installed package brings patches, so nothing would be patched: install it with pip")
    command = [sys.executable, *(["-m"] if module else []), script, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment())
