"""`vllm-compat verify`: the command. Without a folder it extracts a few samples first, with `vllm-compat extract`.

This process never starts vLLM, so it may open a CUDA device: an extraction is a child process, and has ended before
Hugging Face's model is loaded here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path

from vllm_compat.extraction import tiny
from vllm_compat.extraction.streams import say
from vllm_compat.extraction.verdict import SCHEMA
from vllm_compat.extraction.verification import FILES, Options, Refused, verify

SAMPLES, SEQ_LENGTH = 8, 2048  # together more tokens than one step of the scheduler takes, where rows got mixed up


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("model", metavar="MODEL", help="the model's folder or name, as it was extracted from")
    parser.add_argument(
        "folder",
        metavar="OUTPUT_DIR",
        type=Path,
        nargs="?",
        help="folder with data_N.pt (default: extract a few samples here and now, and judge them)",
    )
    parser.add_argument(
        "--files", type=int, default=FILES, metavar="N", help=f"files to recompute, chosen by --seed (default {FILES})"
    )
    parser.add_argument("--all", action="store_true", help="recompute all files")
    parser.add_argument(
        "--read-all", action="store_true", help="compare all files with their checksums, not only these"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice (default 0)")
    parser.add_argument(
        "--layer-ids", type=int, nargs="+", metavar="ID", help="of the files (default: as the folder says)"
    )
    parser.add_argument("--device", default="cpu", help='for Hugging Face: "cpu" (default), "cuda", "cuda:1", "auto"')
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    group = parser.add_argument_group("without OUTPUT_DIR")
    group.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"to extract (default {SAMPLES})")
    group.add_argument(
        "--seq-length", type=int, default=SEQ_LENGTH, metavar="N", help=f"longest in tokens (default {SEQ_LENGTH})"
    )
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--verbose", action="store_true", help="show where an error comes from")


def main(args: Namespace) -> int:
    """Run with parsed options; 0 if everything is right, 1 if not or if it could not be found out, 2 if what was asked
    for cannot be judged."""
    try:
        with contextlib.ExitStack() as stack:
            folder = args.folder
            if folder is None:
                temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-compat-verify-")))
                folder = extract_samples(args, temporary)
            verdict = verify(
                Options(
                    model=args.model,
                    folder=folder,
                    files=args.files,
                    all=args.all or args.folder is None,
                    read_all=args.read_all,
                    seed=args.seed,
                    layer_ids=None if args.layer_ids is None else tuple(args.layer_ids),
                    device=args.device,
                    trust_remote_code=args.trust_remote_code,
                )
            )
    except Exception as error:  # noqa: BLE001 - whatever stops Hugging Face is the answer, also in JSON
        refused = isinstance(error, Refused)
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        if args.json:
            print(json.dumps({"schema": SCHEMA, "ok": False, "error": text}))
        if args.verbose and not refused:
            traceback.print_exc()
        say(f"vllm-compat verify: {text}")
        return 2 if refused else 1
    print(json.dumps(verdict.as_dict(), indent=2) if args.json else verdict.as_text())
    return 0 if verdict.ok else 1


def extract_samples(args: Namespace, folder: Path) -> Path:
    """Extract from conversations of common words, in a child process; returns where the files are."""
    if args.samples < 1:
        raise Refused(f"samples is {args.samples}, expected 1 or more")
    words = (args.seq_length // 8, args.seq_length * 7 // 8)
    data = tiny.make_conversations(folder / "conversations.jsonl", args.samples, args.seed, words=words)
    command = [
        *(sys.executable, "-m", "vllm_compat", "extract", "--target-model-path", args.model),
        *("--train-data-path", str(data), "--output-dir", str(folder / "training_data")),
        *("--token-freq-path", str(folder / "token_freq.pt"), "--hf-cache-dir", str(folder / "cache")),
        *("--seq-length", str(args.seq_length), "--batch-size", str(args.samples), "--num-preprocessing-workers", "1"),
        *("--tensor-parallel-size", str(args.tensor_parallel_size)),
        *(["--layer-ids", *map(str, args.layer_ids)] if args.layer_ids is not None else ()),
    ]
    done = subprocess.run(command, stdout=2, check=False)  # stdout is for the verdict alone
    if done.returncode:
        raise RuntimeError(f"the extraction ended with exit code {done.returncode}; what it said is above")
    return folder / "training_data"
