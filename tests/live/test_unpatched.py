"""speculators without our patches: on vLLM 0.11.0, for which it was written, they change no byte of what fits into one
step; on later releases it does not run without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import vllm_compat

SCRIPT = """
import sys

import torch


def main():
    if not torch.cuda.is_available():  # all that stands in its way without a GPU
        torch.cuda.mem_get_info = lambda: (2**30, 2**30)
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[0, 3, 5], max_model_len=2048)
    results = generator.generate(torch.load(sys.argv[2]))
    torch.save([result["hidden_states"] for result in results], sys.argv[3])


if __name__ == "__main__":
    main()
"""


def test_within_one_step_nothing_changes_where_it_works(
    model: Path, tmp_path: Path, prompts_of: Callable[..., list[list[int]]]
) -> None:
    prompts = prompts_of(40, 1, 700, 16, 2047, 333, 90)
    torch.save(prompts, tmp_path / "prompts.pt")
    (tmp_path / "extract.py").write_text(SCRIPT)

    def run(switch: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "extract.py", model, "prompts.pt", f"{switch}.pt"],
            cwd=tmp_path,
            env=os.environ | {"VLLM_COMPAT": switch},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    alone = run("0")
    (release,) = (package.release for package in vllm_compat.plan().packages if package.module == "vllm")
    if release != "0.11.0":
        assert alone.returncode != 0
        assert re.search(r'File ".*/speculators/', alone.stderr), alone.stderr[-4000:]  # not an error of the script
        return
    assert alone.returncode == 0, alone.stderr[-4000:]
    patched = run("1")
    assert patched.returncode == 0, patched.stderr[-4000:]
    before, after = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    assert [[len(states) for states in result] for result in after] == [[len(prompt)] * 3 for prompt in prompts]
    for expected, got in zip(before, after, strict=True):
        assert all(map(torch.equal, expected, got))
