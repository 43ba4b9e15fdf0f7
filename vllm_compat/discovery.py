"""Which packages bring patches, read from installed metadata without importing any of them.

`importlib.metadata` would answer the same question, but importing it costs more than everything else that
`import vllm_compat` does, and at that moment only the consumers' names are wanted. So the few lines that
matter are read here: `entry_points.txt` of each `*.dist-info` (or `*.egg-info`) folder on sys.path. A
distribution that is there twice counts once, the first on the path, as for imports, and so does an entry point that
two distributions declare alike. Zip files are not read. This file can be loaded on its own, like the start-up hook.
"""

from __future__ import annotations

import os
import sys

GROUP = "vllm_compat.patches"
_NORMAL = str.maketrans("_.", "--")


class EntryPoint:
    """`name = value` as `distribution` declares it."""

    __slots__ = ("distribution", "name", "value")

    def __init__(self, name: str, value: str, distribution: str) -> None:
        self.name, self.value, self.distribution = name, value, distribution


def entry_points() -> tuple[EntryPoint, ...]:
    """The group's entry points, sorted by name; PlanError if two distributions claim one consumer."""
    found: dict[str, EntryPoint] = {}
    seen: set[str] = set()
    for folder in dict.fromkeys(sys.path):
        for info in _infos(folder or os.curdir):
            distribution = os.path.splitext(info)[0].partition("-")[0].lower().translate(_NORMAL)
            text = _read(os.path.join(folder or os.curdir, info, "entry_points.txt"))
            if distribution in seen or GROUP not in text:
                continue
            seen.add(distribution)
            for name, value in _group(text):
                if name in found and found[name].value != value:
                    from vllm_compat.errors import PlanError

                    both = f"{found[name].distribution} and {distribution}"
                    raise PlanError(f"two packages bring patches for {name}: {both}; uninstall one")
                found.setdefault(name, EntryPoint(name, value, distribution))
    return tuple(found[name] for name in sorted(found))


def _infos(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []  # not a folder, or not ours to read


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _group(text: str) -> list[tuple[str, str]]:
    """The `name = value` lines of our section of an entry_points.txt."""
    pairs: list[tuple[str, str]] = []
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            inside = line == f"[{GROUP}]"
        elif inside and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            pairs.append((name.strip(), value.strip()))
    return pairs
