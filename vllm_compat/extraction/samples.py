"""One data file of speculators v0.3.0's format, read without trusting it.

The file may be half-written, damaged, or made by somebody else. It is read with torch's restricted unpickler
(`weights_only=True`), which builds tensors and plain containers and calls nothing, and what comes out is checked
before anybody uses it.
"""

from __future__ import annotations

import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.faults import Fault

if TYPE_CHECKING:
    import torch

KEYS = ("input_ids", "hidden_states", "loss_mask")
_ONES_AND_ZEROS = {0, 1}


class Unfit(Exception):
    """The file cannot be judged row by row; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


@dataclass(frozen=True, eq=False)
class Sample:
    """Contents of `data_N.pt`; on the CPU."""

    input_ids: torch.Tensor  # long [tokens]
    hidden_states: list[torch.Tensor]  # one [tokens, hidden] per layer, in model order
    loss_mask: torch.Tensor  # long [tokens], 0 or 1

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states[0].dtype


def read_sample(
    path: Path, *, layers: int | None = None, hidden_size: int | None = None, mapped: bool = False
) -> Sample:
    """The sample in `path`. `mapped`: map the file instead of reading it, to look at ids and shapes only.

    `layers` and `hidden_size` are what it must have, if that is known. Raises Unfit for a file that is not whole, not
    of the format, or has other shapes than it must.
    """
    import torch

    kind = "wrong-format"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unfit(Fault(kind, "is not a regular file", path.name))
        if not zipfile.is_zipfile(path):  # torch's own formats before 1.6 were no zip files
            size = path.stat().st_size
            raise Unfit(
                Fault(
                    "truncated-file",
                    "is cut short or was never finished: the end is missing",
                    path.name,
                    example=f"{size} bytes",
                )
            )
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Unfit:
        raise
    except Exception as error:  # noqa: BLE001 - unpickling what anybody may have written can raise anything
        text = str(error).strip().partition("\n")[0][:200]
        raise Unfit(
            Fault(
                "damaged-file", "cannot be read as a file of tensors", path.name, example=text or type(error).__name__
            )
        ) from None
    said = _misfit(content, layers, hidden_size)
    if said is not None:
        raise Unfit(Fault(kind, *said[:1], path.name, example=said[1]))
    return Sample(content["input_ids"], list(content["hidden_states"]), content["loss_mask"])


def _misfit(content: Any, layers: int | None, hidden_size: int | None) -> tuple[str, str] | None:
    """What is not as the format wants it, in general and in this file; None if nothing."""
    import torch

    if not isinstance(content, dict) or set(content) != set(KEYS):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        return f"must hold {', '.join(KEYS)}", f"it holds {found}"
    ids, states, mask = (content[key] for key in KEYS)
    for key, value in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.long or value.ndim != 1:
            return f"{key} must be a long tensor of one dimension", _shape(value)
    if not len(ids):
        return "has no tokens", ""
    if len(mask) != len(ids):
        return "loss_mask must be as long as input_ids", f"{len(mask)} and {len(ids)}"
    if not set(mask.unique().tolist()) <= _ONES_AND_ZEROS:
        return "loss_mask must be 0 or 1", f"{mask.unique().tolist()[:5]}"
    if not isinstance(states, list | tuple) or not all(isinstance(each, torch.Tensor) for each in states):
        return "hidden_states must be a list of tensors", type(states).__name__
    if not states or layers not in (None, len(states)):
        return f"must hold {layers or 'some'} layers", f"it holds {len(states)}"
    for number, each in enumerate(states):
        if not each.is_floating_point() or each.ndim != 2 or each.layout != torch.strided:
            return "a layer must be a matrix of floating-point numbers", f"tensor {number}: {_shape(each)}"
        if len(each) != len(ids):
            return "a layer must have one row per token", f"tensor {number}: {len(each)} rows, {len(ids)} tokens"
        if each.shape[1] != (hidden_size or states[0].shape[1]):
            want = hidden_size or states[0].shape[1]
            return f"a row must have {want} values", f"tensor {number}: {each.shape[1]}"
    return None


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__


def damaged_tensor(path: Path) -> str | None:
    """Name of the first tensor whose bytes are not those that were written, by the checksums (CRC-32) that every file
    of `torch.save` carries and `torch.load` does not look at; None if all fit. Nothing is unpickled. Reads the whole
    file."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()
