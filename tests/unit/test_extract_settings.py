"""Flags of v0.3.0's own script keep their names and defaults, and what cannot work is said at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction.settings import Settings, add_arguments, from_arguments

REQUIRED = ["--target-model-path", "M", "--train-data-path", "sharegpt", "--output-dir", "out"]
# Of scripts/data_generation_offline.py at v0.3.0. Its default of --tensor-parallel-size is the number of devices.
SCRIPT = {
    "gpu_memory_utilization": 0.8,
    "seq_length": 2048,
    "max_samples": None,
    "token_freq_path": Path("token_freq.pt"),
    "hf_cache_dir": None,
    "assistant_pattern": None,
    "turn_dropout": False,
    "layer_ids": None,
    "batch_size": 8,
    "seed": 0,
    "start_idx": 0,
    "num_preprocessing_workers": 8,
    "tensor_parallel_size": None,
}


def parsed(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args([*REQUIRED, *arguments]))


def test_defaults_are_those_of_the_script() -> None:
    settings = parsed()
    assert {name: getattr(settings, name) for name in SCRIPT} == SCRIPT
    assert settings == Settings(target_model_path="M", train_data_path="sharegpt", output_dir=Path("out"))
    settings.check()


def test_the_help_says_that_images_are_out_of_reach() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    said = "Text prompts only: images are out of reach of speculators 0.3.0"
    assert said in " ".join(parser.format_help().split())


def test_every_flag_arrives() -> None:
    settings = parsed(
        *("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.5", "--seq-length", "64", "--max-samples", "9"),
        *("--token-freq-path", "f.pt", "--hf-cache-dir", "c", "--assistant-pattern", "x(.*)y", "--turn-dropout"),
        *("--layer-ids", "1", "5", "--batch-size", "4", "--seed", "3", "--start-idx", "7"),
        *("--num-preprocessing-workers", "1", "--data-parallel", "3", "--ray", "--max-restarts", "0", "--writers", "2"),
        *("--write-queue", "0.5", "--quick-scan", "--dry-run", "--verbose"),
    )
    assert settings == Settings(
        target_model_path="M",
        train_data_path="sharegpt",
        output_dir=Path("out"),
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        seq_length=64,
        max_samples=9,
        token_freq_path=Path("f.pt"),
        hf_cache_dir="c",
        assistant_pattern="x(.*)y",
        turn_dropout=True,
        layer_ids=(1, 5),
        batch_size=4,
        seed=3,
        start_idx=7,
        num_preprocessing_workers=1,
        data_parallel=3,
        ray="auto",
        max_restarts=0,
        writers=2,
        write_queue=0.5,
        quick_scan=True,
        dry_run=True,
        verbose=True,
    )
    assert parsed("--ray", "host:6379").ray == "host:6379"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 0}, "--batch-size is 0, expected 1 or more"),
        ({"seq_length": 1}, "--seq-length is 1, expected 2 or more"),
        ({"start_idx": -1}, "--start-idx is -1"),
        ({"data_parallel": 0}, "--data-parallel is 0"),
        ({"max_samples": 0}, "--max-samples is 0"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"write_queue": 0.0}, "--write-queue is 0.0"),
        ({"gpu_memory_utilization": 80.0}, "--gpu-memory-utilization is 80.0"),
        ({"layer_ids": (3, 1)}, "must ascend"),
        ({"layer_ids": (1, 1)}, "must ascend"),
        ({"layer_ids": (-1,)}, "counted from 0"),
        ({"layer_ids": ()}, "counted from 0"),
        ({"token_freq_path": Path("out/token_freq.pt")}, "take it for a sample"),
        ({"output_dir": Path(__file__)}, "is there and not a folder: name another place"),
    ],
)
def test_what_cannot_work(change: dict[str, Any], said: str) -> None:
    asked = {"target_model_path": "M", "train_data_path": "sharegpt", "output_dir": Path("out")}
    with pytest.raises(ValueError, match=said):
        Settings(**{**asked, **change}).check()
