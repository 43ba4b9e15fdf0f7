"""`vllm-compat demo`: the consumer's whole data generation on real vLLM, proved row by row.

A tiny random-weight chat model and a small conversation data set are made in a temporary folder; then
speculators' own, unmodified preprocessing and generator run as its offline script runs them. The files that
came out are read back and compared with a Hugging Face forward pass of each prompt alone. Nothing is
downloaded and nothing outside the folder is written.

`run` does it and returns a `Verdict`; `main` is the command. Progress goes to stderr, the verdict to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_compat.extraction import kernels, tiny
from vllm_compat.extraction.compare import compare
from vllm_compat.extraction.demo_files import extract, read_back, write_config
from vllm_compat.extraction.demo_verdict import Verdict
from vllm_compat.extraction.reference import reference_states
from vllm_compat.extraction.stages import Stages
from vllm_compat.extraction.streams import say, stdout_to_stderr

MODEL_LAYERS = 8  # with fewer, the consumer's automatic choice of four layers names one of them twice
# The CPU build of vLLM computes float32 checkpoints in bfloat16 anyway (dtype "auto"); saying so in the
# checkpoint makes every device compute the same and the reference comparable.
MODEL_DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `run` is asked for. `layer_ids` None is the consumer's own choice; `output_dir` None a temporary
    folder, which is removed afterwards unless `keep`."""

    tensor_parallel_size: int = 1
    samples: int = 12
    layer_ids: tuple[int, ...] | None = None
    seq_length: int = 2048
    batch_size: int = 8
    output_dir: Path | None = None
    keep: bool = False
    verbose: bool = False

    def check(self) -> None:
        """Raise ValueError for what cannot work, before anything slow starts."""
        for name in ("tensor_parallel_size", "samples", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.seq_length < 64:
            raise ValueError(f"seq_length is {self.seq_length}, expected 64 or more")
        for layer_id in self.layer_ids or ():
            if not 0 <= layer_id < MODEL_LAYERS:
                raise ValueError(f"layer {layer_id} is not one of the model's layers 0 to {MODEL_LAYERS - 1}")
        if self.layer_ids is not None and list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(
                f"layer ids {list(self.layer_ids)} must ascend: states come in the model's order of layers"
            )
        if self.output_dir is not None and self.output_dir.exists() and any(self.output_dir.iterdir()):
            raise ValueError(f"{self.output_dir} is not empty: name a folder that is new or empty")


def run(options: Options) -> Verdict:
    """Make model and data, extract, compare.

    What is wrong with the data is in the verdict. Raises ValueError for options that cannot work, CompatError
    for an installation that cannot be patched, and whatever stops the consumer or vLLM.
    """
    options.check()
    with contextlib.ExitStack() as stack:
        kept = options.output_dir is not None or options.keep
        if options.output_dir is not None:
            folder = options.output_dir.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        elif options.keep:
            folder = Path(tempfile.mkdtemp(prefix="vllm-compat-demo-"))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-compat-demo-")))
        stack.enter_context(stdout_to_stderr())
        return _run(options, folder, str(folder) if kept else None)


def _run(options: Options, folder: Path, kept: str | None) -> Verdict:
    stages = Stages(6)
    model, data, out = folder / "model", folder / "conversations.jsonl", folder / "training_data"

    with stages("loading vLLM"):
        device = _prepare(options)
        import vllm_compat  # activates the patches, if nothing has yet

    with stages(f"making a {MODEL_LAYERS}-layer model and {options.samples} conversations"):
        tiny.make_model(model, layers=MODEL_LAYERS, dtype=MODEL_DTYPE, max_len=options.seq_length)
        tiny.make_tokenizer(model)
        # The longest are a little longer than seq_length and get truncated, as some always do.
        words = (options.seq_length // 8, options.seq_length * 7 // 8)
        tiny.make_conversations(data, options.samples, words=words)

    with stages("preprocessing with speculators"):
        from speculators.data_generation.preprocessing import load_and_preprocess_dataset

        dataset, _tokenizer = load_and_preprocess_dataset(
            target_model_path=str(model),
            train_data_path=str(data),
            seq_length=options.seq_length,
            build_dataset_num_proc=1,
            token_freq_path=str(folder / "token_freq.pt"),
            cache_dir=str(folder / "cache"),
        )

    with stages(f"starting vLLM on {device}, tensor parallel {options.tensor_parallel_size}"):
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        generator = VllmHiddenStatesGenerator(
            model_path=str(model),
            layer_ids=None if options.layer_ids is None else list(options.layer_ids),
            max_model_len=options.seq_length,
            tensor_parallel_size=options.tensor_parallel_size,
        )
    try:
        layer_ids = tuple(generator.layer_ids)
        dtype = str(generator.vllm_config.model_config.dtype)
        status = vllm_compat.status()
        with stages(f"extracting layers {', '.join(map(str, layer_ids))}"):
            batches, extracting = extract(generator, dataset, options.batch_size, out)
            write_config(generator, options.seq_length, len(dataset), data, folder / "cache", out)
    finally:
        generator.executor.shutdown()  # else the workers would compute beside the reference

    with stages("comparing with Hugging Face, one prompt at a time"):
        prompts, states, file_problems = read_back(out, dataset, options.seq_length, len(layer_ids), dtype)
        import torch

        runtime_dtype = getattr(torch, dtype.removeprefix("torch."))
        want = reference_states(model, prompts, layer_ids, dtype=runtime_dtype)
        report = compare(states, want, layer_ids=layer_ids, prompts=prompts, cut=kernels.cut())

    tokens = sum(len(prompt) for prompt in prompts)
    return Verdict(
        versions=_versions(status),
        device=device,
        dtype=dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        patches=_applied(status),
        workers=len(status["workers"]),
        model_runner=next((report["model_runner"] for report in status["workers"]), None),
        layer_ids=layer_ids,
        samples=len(prompts),
        tokens=tokens,
        largest_batch=max(batches),
        seconds=stages.seconds,
        tokens_per_second=tokens / extracting,
        report=report,
        file_problems=tuple(file_problems),
        folder=kept,
    )


def _prepare(options: Options) -> str:
    """Set what a run without network on a small machine needs, if the user has not; returns the device type.

    Before vLLM and the Hugging Face libraries are imported: they read these once. The workers inherit them.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns in every forked process
    if not options.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        logging.getLogger("speculators").setLevel(logging.WARNING)
    # vLLM's platform knows the device from the build and from NVML: CUDA is not opened in this process.
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes 4 or more
        if options.tensor_parallel_size > 1:
            # Otherwise vLLM wants a NUMA node for each worker, which small machines have not.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return device


def _versions(status: Mapping[str, Any]) -> dict[str, str]:
    """What ran, by module; consumer and runtime as the plan judged them."""
    versions = {"python": platform.python_version(), "vllm_compat": str(status["version"])}
    for consumer in status["consumers"]:
        versions |= {module: str(version) for module, version in consumer["versions"].items()}
    for module in ("torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.setdefault(module, metadata.version(module))
    return versions


def _applied(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids of the patches in `vllm_compat.status()`, each once (it may have several targets), in order."""
    return tuple(dict.fromkeys(entry["patch"] for entry in status["patches"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    default = Options()
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="workers (default 1)")
    parser.add_argument(
        "--samples",
        type=int,
        default=default.samples,
        metavar="N",
        help=f"conversations to extract (default {default.samples})",
    )
    parser.add_argument(
        "--layer-ids",
        "--layers",
        type=int,
        nargs="+",
        metavar="ID",
        help=f"layers to extract, of 0 to {MODEL_LAYERS - 1} (default: speculators' own choice)",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        default=default.seq_length,
        metavar="N",
        help=f"longest prompt in tokens (default {default.seq_length})",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=default.batch_size,
        metavar="N",
        help=f"prompts in one call (default {default.batch_size})",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="new or empty folder for everything that is made (default: a temporary one)",
    )
    parser.add_argument("--keep", action="store_true", help="do not remove the temporary folder")
    parser.add_argument("--verbose", action="store_true", help="show the log lines of vLLM and speculators too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Run with parsed options; 0 if every row is right, 1 otherwise."""
    options = Options(
        tensor_parallel_size=args.tensor_parallel_size,
        samples=args.samples,
        layer_ids=None if args.layer_ids is None else tuple(args.layer_ids),
        seq_length=args.seq_length,
        batch_size=args.batch_size,
        output_dir=args.output_dir,
        keep=args.keep,
        verbose=args.verbose,
    )
    try:
        verdict = run(options)
    except Exception as error:  # noqa: BLE001 - whatever stops vLLM is the answer, also in JSON
        if args.json:
            print(json.dumps({"schema": 1, "ok": False, "error": f"{type(error).__name__}: {error}"}))
        if options.verbose:
            traceback.print_exc()
        say(f"vllm-compat demo: {type(error).__name__}: {error}")
        if not options.verbose:
            say("--verbose shows where, with vLLM's own log lines.")
        return 1
    print(json.dumps(verdict.as_dict(), indent=2) if args.json else verdict.as_text())
    return 0 if verdict.ok else 1


def _command(argv: Sequence[str] | None = None) -> int:
    """`python -m vllm_compat.extraction.demo`, for a checkout whose command is not installed."""
    parser = argparse.ArgumentParser(prog="vllm-compat demo", description=__doc__.split("\n\n")[0])
    add_arguments(parser)
    return main(parser.parse_args(argv))


# vLLM's spawned workers import the main module again: the guard keeps them from starting another demo.
if __name__ == "__main__":
    sys.exit(_command())
