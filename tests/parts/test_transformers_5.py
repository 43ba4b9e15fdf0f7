"""The consumer imports on the transformers that is installed here, in this process and in those that it spawns; what
was lent for that is not there afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat.patches.transformers_5 import MASK_UTILS, no_mask
from vllm_compat.plan import plan

OURS = {"transformers-5": "PydanticUndefinedAnnotation: name 'torch'", "transformers-5-masks": f"'{MASK_UTILS}'"}
APPLIED = [each for each in OURS if each in plan().applies]
SCRIPT = """
import importlib.util, multiprocessing, sys
import transformers.configuration_utils as module

before = set(vars(module))
import vllm_compat
import speculators.models.eagle3


def look():
    lent = sys.modules.get("transformers.modeling_attn_mask_utils")
    assert set(vars(module)) == before, set(vars(module)) ^ before
    assert lent is None or lent.__spec__ is not None, lent
    assert not any(name == "vllm" for name in sys.modules)
    print(sorted(each["patch"] for each in vllm_compat.status()["patches"] if "transformers" in each["patch"]))


if __name__ == "__main__":
    look()
    sys.stdout.flush()
    child = multiprocessing.get_context("spawn").Process(target=look)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def run(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, script], env=os.environ | env, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_consumer_imports_here_and_in_a_spawned_process(active: None, tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [str(APPLIED)] * 2


@pytest.mark.parametrize("patch_id", OURS)
def test_each_patch_is_for_releases_that_need_it(patch_id: str, active: None, tmp_path: Path) -> None:
    done = run(tmp_path, VLLM_COMPAT_DISABLE=patch_id, VLLM_COMPAT_STRICT="0")
    if patch_id in APPLIED:
        assert done.returncode != 0
        assert OURS[patch_id] in done.stderr
    else:
        assert done.returncode == 0, done.stderr[-4000:]


def test_the_function_that_is_gone_says_so_when_it_is_called() -> None:
    with pytest.raises(RuntimeError, match=r"transformers [\d.]+ has no _prepare_4d_causal_attention_mask"):
        no_mask()
