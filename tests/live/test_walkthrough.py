"""docs/walkthrough.md as a reader runs it: every block of it, in order, in one shell; then a look at what came out."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "walkthrough.md"
_BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.M)
CONVERSATIONS, HIDDEN = 5, 64


@dataclass(frozen=True)
class Walk:
    folder: Path
    done: subprocess.CompletedProcess[str]
    commands: str


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The page has been walked through, in a folder of its own."""
    folder = tmp_path_factory.mktemp("walkthrough")
    commands = ["set -euo pipefail"]
    for block in _BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["language"] == "python":
            name = re.match(r"# (\w+\.py)\n", block["text"])
            assert name is not None, "a Python block begins with the name of its file"
            (folder / name[1]).write_text(block["text"])
        elif block["why"] is None:
            assert block["language"] == "bash"
            commands.append(block["text"])
    script = "\n".join(commands)
    # As a user has it: without the settings that the test run itself may have.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HF_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "HF_HUB_OFFLINE": "1"}
    env["HF_HOME"] = str(folder / "huggingface")  # the cache of data sets; its usual place is the user's
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    return Walk(folder, done, script)


def test_every_command_works(walk: Walk) -> None:
    assert walk.done.returncode == 0, walk.done.stdout[-3000:] + walk.done.stderr[-6000:]
    for command in ("vllm-compat plan", "vllm-compat extract", "vllm-compat verify", "python first_step.py"):
        assert command in walk.commands
    verdicts = [line for line in walk.done.stdout.splitlines() if line.startswith("OK: ")]
    right = "OK: every row belongs to its prompt, its position and its layer."
    assert [verdict for verdict in verdicts if "compares them" not in verdict] == [right, right]
    assert len(verdicts) == 3  # `extract` says that its files are there, and who compares them


def test_the_trainer_takes_the_files_for_what_they_are(walk: Walk) -> None:
    """Three layers feed the draft model, the last one the verifier's head; one row is shifted away."""
    from speculators.train.data import Eagle3SampleFileDataset

    samples = list(Eagle3SampleFileDataset(max_len=512, datapath=str(walk.folder / "training_data")))
    assert len(samples) == CONVERSATIONS
    for sample in samples:
        (rows,) = sample["input_ids"].shape
        assert 0 < rows < 511
        assert list(sample["hidden_states"].shape) == [rows, 3 * HIDDEN]
        assert list(sample["verifier_last_hidden_states"].shape) == [rows, HIDDEN]
        assert 0 < int(sample["loss_mask"].sum()) < rows


def test_the_first_step_was_made(walk: Walk) -> None:
    """The loss is a number, and every weight that is learned has had a gradient."""
    import torch
    from safetensors.torch import load_file

    steps = [ast.literal_eval(line)["train"] for line in walk.done.stderr.splitlines() if line.startswith("{'train'")]
    assert steps
    assert all(math.isfinite(step["loss"]) and step["loss"] > 0 for step in steps)
    weights = load_file(walk.folder / "checkpoints" / "0" / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    learned = weights.keys() - {"embed_tokens.weight", "d2t", "t2d"}  # those are the verifier's
    state = torch.load(walk.folder / "checkpoints" / "0" / "optimizer_state_dict.pt", weights_only=True)["state"]
    assert len(state) == len(learned) > 10
    for number, moments in state.items():
        assert float(moments["exp_avg"].abs().max()) > 0, number
