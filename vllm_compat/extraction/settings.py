"""`vllm-compat extract`: what it is asked for. Flags of v0.3.0's own script keep their names and defaults."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises nothing by itself: `check` says what cannot work. Names are those of the flags."""

    target_model_path: str
    train_data_path: str
    output_dir: Path
    # as in v0.3.0's script
    tensor_parallel_size: int | None = None  # None: all visible devices, divided among the replicas
    gpu_memory_utilization: float = 0.8
    seq_length: int = 2048
    max_samples: int | None = None
    token_freq_path: Path = Path("token_freq.pt")
    hf_cache_dir: str | None = None
    assistant_pattern: str | None = None
    turn_dropout: bool = False
    layer_ids: tuple[int, ...] | None = None
    batch_size: int = 8
    seed: int = 0
    start_idx: int = 0
    num_preprocessing_workers: int = 8
    # ours
    data_parallel: int = 1
    ray: str | None = None  # address of a Ray cluster; None: replicas are processes of this machine
    max_restarts: int = 3
    writers: int = 4
    write_queue: float = 4.0  # GiB
    quick_scan: bool = False
    dry_run: bool = False
    verbose: bool = False
    engine: str = "vllm_compat.extraction.engine:SpeculatorsEngine"  # for tests: what computes

    def check(self) -> None:
        """Raise ValueError for what cannot work, before anything slow starts."""
        least = {"seq_length": 2, "start_idx": 0, "max_restarts": 0}
        for name in (
            *("tensor_parallel_size", "seq_length", "max_samples", "batch_size", "start_idx", "data_parallel"),
            *("num_preprocessing_workers", "max_restarts", "writers"),
        ):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise ValueError(f"{_flag(name)} is {value}, expected {least.get(name, 1)} or more")
        if self.write_queue <= 0:
            raise ValueError(f"--write-queue is {self.write_queue}, expected more than 0 GiB")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}, expected a part of 1")
        if self.layer_ids is not None:
            if not self.layer_ids or min(self.layer_ids) < 0:
                raise ValueError(f"--layer-ids {list(self.layer_ids)}: expected decoder layers, counted from 0")
            if list(self.layer_ids) != sorted(set(self.layer_ids)):
                raise ValueError(
                    f"--layer-ids {list(self.layer_ids)} must ascend: states come in the model's order of layers, "
                    "whatever order is asked for, and data_config.json would name them wrongly"
                )
        if os.path.lexists(self.output_dir) and not self.output_dir.is_dir():
            raise ValueError(f"--output-dir {self.output_dir} is there and not a folder: name another place")
        if self.output_dir.resolve() in self.token_freq_path.resolve().parents:
            raise ValueError(
                f"--token-freq-path {self.token_freq_path} is below --output-dir: speculators' trainer would take it "
                "for a sample, since it reads every .pt file there. Name another place"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    default = {each.name: each.default for each in fields(Settings)}

    def add(group: Any, name: str, text: str, *, kind: Any = int, metavar: str | None = "N", **more: Any) -> None:
        shown = default[name]
        text = text if "default" in text or shown is None else f"{text} (default {shown})"
        group.add_argument(_flag(name), type=kind, metavar=metavar, default=shown, help=text, **more)

    group = parser.add_argument_group("as in the script of speculators v0.3.0")
    group.add_argument("--target-model-path", required=True, metavar="MODEL", help="folder, or name on the Hub")
    group.add_argument(
        "--train-data-path",
        required=True,
        metavar="DATA",
        help="sharegpt, ultrachat, a .json or .jsonl file, or a folder of Dataset.save_to_disk. Text prompts only: "
        "images are out of reach of speculators 0.3.0",
    )
    group.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="where the .pt files go")
    add(
        group,
        "tensor_parallel_size",
        "devices of one replica (default: all visible ones, divided among the replicas; with --ray 1)",
    )
    add(group, "gpu_memory_utilization", "part of a device's memory that is used", kind=float, metavar="PART")
    add(group, "seq_length", "longest prompt in tokens; one less is extracted")
    add(group, "max_samples", "use only so many conversations (default: all)")
    add(group, "token_freq_path", "token frequencies go here (default ./token_freq.pt)", kind=Path, metavar="FILE")
    add(group, "hf_cache_dir", "cache of Hugging Face's datasets (default: its own)", kind=str, metavar="DIR")
    add(
        group,
        "assistant_pattern",
        "regular expression of an assistant's answer (default: found from the chat template)",
        kind=str,
        metavar="REGEX",
    )
    group.add_argument("--turn-dropout", action="store_true", help="keep a random number of first turns")
    add(group, "layer_ids", "layers to extract, ascending (default: speculators' choice)", nargs="+", metavar="ID")
    add(group, "batch_size", "prompts in one call of the generator")
    add(group, "seed", "of the shuffling")
    add(group, "start_idx", "number of the first file")
    add(group, "num_preprocessing_workers", "processes for tokenizing")
    group = parser.add_argument_group("of vllm-compat")
    add(group, "data_parallel", "replicas of the model, each with its own devices")
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run the replicas as actors of a Ray cluster (without ADDRESS: the one that this machine belongs to)",
    )
    add(group, "max_restarts", "how often a lost replica is replaced before the run fails")
    add(group, "writers", "threads of each replica that write files")
    add(group, "write_queue", "states that may wait for a slow disk, GiB of each replica's memory", kind=float)
    group.add_argument(
        "--quick-scan", action="store_true", help="on resume compare sizes of files, not their contents (SHA-256)"
    )
    group.add_argument("--dry-run", action="store_true", help="prepare the data, say what would be done, and end")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    group.add_argument("--verbose", action="store_true", help="show the log lines of vLLM and speculators too")


def from_arguments(arguments: argparse.Namespace) -> Settings:
    known = {each.name for each in fields(Settings)}
    given = {name: value for name, value in vars(arguments).items() if name in known}
    if given.get("layer_ids") is not None:
        given["layer_ids"] = tuple(given["layer_ids"])
    return Settings(**given)
