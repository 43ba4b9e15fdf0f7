"""How parent and workers tell that they run the same code: a hash over our files, and what must answer in a worker."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import _vllm_compat_startup
import vllm_compat
import vllm_compat.patches

EXPECTED = "VLLM_COMPAT_EXPECTED_FINGERPRINT"
"""Environment variable through which the parent tells its workers what to expect."""

WORKER_SIDE = {
    "capture": ("_setup_hidden_states_capture", "_reset_capture", "_vllm_compat_check_model"),
    "hand-over": ("_get_captured_states", "_vllm_compat_rows_by_value"),
    "devices": ("_vllm_compat_memory",),
    "workers": ("_vllm_compat_report",),
}
"""Patches with a part that runs in the worker, and the methods of the extension that are that part."""


@functools.cache
def fingerprint() -> str:
    """SHA-256 (first 16 hex digits) over names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for package in (_vllm_compat_startup, vllm_compat, vllm_compat.patches):
        for folder in sorted(package.__path__):
            files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*.py")}
            for name in sorted(files):
                if package is vllm_compat and name.startswith("patches/"):
                    continue  # an installed wheel has them below the package, a source tree beside it
                digest.update(f"{package.__name__}/{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()[:16]
