"""Are these hidden states those of this model? A folder is judged against Hugging Face.

Every file is opened and looked at from outside: name, size, shapes, types. Some of them, chosen by a seed, are read
whole, compared with their checksums, and recomputed: Hugging Face's forward pass of each prompt alone, every row of
every layer. All rows of a chosen file are compared, because the forward pass computes all of them anyway. One sample is
in memory at a time, and the model is loaded once.
"""

from __future__ import annotations

import contextlib
import platform
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_compat.extraction.compare import Report
from vllm_compat.extraction.faults import Fault
from vllm_compat.extraction.inventory import Folder, describe, look
from vllm_compat.extraction.judge import Judge, check_whole
from vllm_compat.extraction.manifest import HEADER
from vllm_compat.extraction.model import look_at
from vllm_compat.extraction.reference import Reference
from vllm_compat.extraction.samples import Unfit, read_sample
from vllm_compat.extraction.stages import Stages
from vllm_compat.extraction.streams import say, stdout_to_stderr
from vllm_compat.extraction.verdict import Faults, Verdict

FILES = 16
_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")  # those of which the rounding is known
_NEAR = 8  # files on either side: those of the same call of `generate`, by v0.3.0's batch size


class Refused(ValueError):
    """What was asked for cannot be judged: the folder, the model or an option is not what it must be."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `verify` is asked for."""

    model: str
    folder: Path
    files: int = FILES  # to recompute
    all: bool = False  # recompute every file
    read_all: bool = False  # compare every file with its checksums
    seed: int = 0
    layer_ids: tuple[int, ...] | None = None  # None: as the folder says
    device: str = "cpu"
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise Refused for what cannot work, before anything slow starts."""
        if self.files < 1:
            raise Refused(f"files is {self.files}, expected 1 or more")
        if not self.folder.is_dir():
            raise Refused(f"{self.folder} is no folder")
        if self.layer_ids is not None and list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise Refused(f"layer ids {list(self.layer_ids)} must ascend: states come in the model's order of layers")


def verify(options: Options) -> Verdict:
    """Judge the folder. What is wrong with the data is in the verdict; Refused means that it cannot be judged, and
    whatever stops Hugging Face is raised."""
    options.check()
    with stdout_to_stderr():  # stdout is for the verdict alone, whatever a model's code prints
        model = _model(options)
        folder = look(options.folder)
        if not folder.names:
            raise Refused(f"{options.folder} has no data_N.pt: give the --output-dir of an extraction")
        return _verify(options, model, folder)


@dataclass(frozen=True)
class _Model:
    """What the model's configuration says."""

    layers: int
    hidden_size: int
    dtype: str  # of the checkpoint; empty if it does not say
    sha256: str  # see `model.Model`


def _model(options: Options) -> _Model:
    """Read before any weight is, so that a wrong name or a wrong model shows at once."""
    import transformers

    try:
        known = look_at(options.model, trust_remote_code=options.trust_remote_code)
        whole = transformers.AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise Refused(f"transformers cannot read a model from {options.model}: {error}") from None
    text = whole.get_text_config()
    dtypes = (getattr(each, name, None) for name in ("dtype", "torch_dtype") for each in (whole, text))
    dtype = next((str(each) for each in dtypes if each), "")
    return _Model(text.num_hidden_layers, known.hidden_size, dtype, known.sha256)


def _verify(options: Options, model: _Model, folder: Folder) -> Verdict:
    import torch

    stages, faults, notes = Stages(), Faults(folder.faults), list(folder.notes)
    if folder.config is not None and folder.config.hidden_size != model.hidden_size:
        what = f"the data are of a model with hidden size {folder.config.hidden_size}, this one has {model.hidden_size}"
        faults.add(Fault("config", what))
    recorded = folder.manifest.request.get("model_sha256") if folder.manifest is not None else None
    if recorded not in (None, model.sha256):
        notes.append(f"{options.model} is not the very model of {HEADER}: its configuration or weight files differ")
    layer_ids, layers_from = _layers(options, model, folder)
    with stages(f"opening {len(folder.names)} files"):
        dtypes = _open(folder, len(layer_ids), model.hidden_size, faults, notes)
    dtype = _common(dtypes, model, faults, notes)
    chosen = _choose(options, [name for name, each in dtypes.items() if each in _DTYPES])
    whole = list(dtypes) if options.read_all else chosen
    with stages(f"reading {len(whole)} files whole"):
        for name in whole:
            faults.add(*check_whole(folder.path / name, folder.records.get(name)))
    with stages(f"loading {options.model} on {options.device}"):
        torch_dtype = getattr(torch, dtype.removeprefix("torch."))
        reference = Reference(
            options.model, dtype=torch_dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
    judge = Judge(reference, layer_ids, torch_dtype, faults, cut=folder.cut)
    if folder.cut > 1:
        notes.append(f"the kernels that made the files drop bits, so {folder.cut:g} times the tolerance is allowed")
    with stages(f"recomputing {len(chosen)} files"):
        for number, name in enumerate(chosen, 1):
            judge.judge(folder.path / name)
            say(f"      {number}/{len(chosen)} files, {judge.report.rows} rows")
    if judge.unexplained:
        with stages("searching where the rows come from that are like nothing in their prompt"):
            judge.search([folder.path / name for name in _near(folder.names, judge.unexplained, chosen)])
    undecided = sum(layer.undecided for layer in judge.report.layers)
    if undecided:
        notes.append(
            f"{undecided} rows of all layers together cannot be told from another row or layer: they are alike"
        )
    if excused := _excused(judge.report):
        notes.append(excused)
    return Verdict(
        model=options.model,
        model_layers=reference.layers,
        folder=str(options.folder),
        made_by=describe(folder),
        made_with=folder.made_with,
        manifest=folder.manifest is not None,
        versions=_versions(),
        device=options.device,
        dtype=dtype,
        layer_ids=layer_ids,
        layers_from=layers_from,
        files=len(folder.names),
        whole=len(whole),
        recomputed=chosen,
        seed=options.seed,
        report=judge.report,
        faults=faults,
        notes=notes,
        seconds=stages.seconds,
    )


def _excused(report: Report) -> str:
    """In a mixture of experts: how many rows were held to what noise does to the reference; empty if none was."""
    most = max(report.layers, key=lambda layer: (layer.level, layer.excused), default=None)
    if most is None or not most.level:
        return ""
    worst = max(report.layers, key=lambda layer: layer.allowed)
    return (
        f"{most.level} of {most.rows} rows: experts nearly level (layer {most.layer_id}, where most are); judged by "
        f"how far noise takes Hugging Face's own rows: up to {worst.allowed:.2g} of their length is allowed (layer "
        f"{worst.layer_id}). Rows beyond the usual tolerance: "
        + ", ".join(f"{layer.excused} of layer {layer.layer_id}" for layer in report.layers)
    )


def _layers(options: Options, model: _Model, folder: Folder) -> tuple[tuple[int, ...], str]:
    """Which layers the files hold, ascending, and what says so."""
    default = tuple(sorted({2, model.layers // 2, model.layers - 3, model.layers - 1}))  # of speculators v0.3.0
    if options.layer_ids is not None:
        layer_ids, source = options.layer_ids, "--layer-ids"
    elif folder.layer_ids is not None:
        layer_ids, source = folder.layer_ids, "the folder"
    elif len(default) == _count(folder):
        layer_ids, source = default, f"speculators' own choice for {model.layers} layers"
    else:
        raise Refused(f"{options.folder} does not say which layers its files hold: give --layer-ids")
    for layer_id in layer_ids:
        if not 0 <= layer_id < model.layers:
            raise Refused(
                f"layer {layer_id} (from {source}) is not one of the layers 0 to {model.layers - 1} of "
                f"{options.model}: give the model that the data were made with"
            )
    return layer_ids, source


def _count(folder: Folder) -> int | None:
    """How many layers the first file holds that can be read."""
    for name in folder.names:
        with contextlib.suppress(Unfit):
            return len(read_sample(folder.path / name, mapped=True).hidden_states)
    return None


def _open(folder: Folder, layers: int, hidden_size: int, faults: Faults, notes: list[str]) -> dict[str, str]:
    """Look at every file from outside; the dtype of each that has the right form."""
    dtypes: dict[str, str] = {}
    prompts: dict[int, str] = {}  # hash of the token ids -> first file with them
    again = Counter[str]()
    for name in folder.names:
        try:
            sample = read_sample(folder.path / name, layers=layers, hidden_size=hidden_size, mapped=True)
        except Unfit as unfit:
            faults.add(unfit.fault)
            continue
        found = sorted({str(each.dtype) for each in sample.hidden_states})
        if len(found) > 1 or found[0] not in _DTYPES:
            faults.add(Fault("wrong-dtype", f"layers are {', '.join(found)}", name))
            continue
        dtypes[name] = found[0]
        again[prompts.setdefault(hash(sample.input_ids.numpy().tobytes()), name)] += 1
    repeated = {name: count for name, count in again.items() if count > 1}
    if repeated:
        name = next(iter(repeated))
        notes.append(
            f"{sum(repeated.values())} files hold prompts that others hold too, {repeated[name]} that of {name}"
        )
    return dtypes


def _common(dtypes: Mapping[str, str], model: _Model, faults: Faults, notes: list[str]) -> str:
    """The dtype of most files; the others are faults."""
    counted = Counter(dtypes.values())
    if not counted:
        return model.dtype if model.dtype in _DTYPES else _DTYPES[0]
    (dtype, _), *_ = counted.most_common(1)
    for name, each in dtypes.items():
        if each != dtype:
            faults.add(Fault("wrong-dtype", f"is {each}, most files are {dtype}", name))
    if model.dtype in _DTYPES[:2] and dtype != model.dtype:
        notes.append(f"the model's weights are {model.dtype}, the states {dtype}: computed so, or converted?")
    return dtype


def _choose(options: Options, names: Sequence[str]) -> list[str]:
    """The files to recompute, in order."""
    if options.all or len(names) <= options.files:
        return list(names)
    return [names[n] for n in sorted(random.Random(options.seed).sample(range(len(names)), options.files))]


def _near(names: Sequence[str], wrong: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Where the rows of the files `wrong` may come from, likeliest first: files beside them, then the chosen ones."""
    places = {name: place for place, name in enumerate(names)}
    near = {
        names[place]: abs(place - places[each])
        for each in wrong
        for place in range(max(0, places[each] - _NEAR), min(len(names), places[each] + _NEAR + 1))
    }
    return list(dict.fromkeys([*sorted(near, key=near.__getitem__), *chosen]))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("vllm-compat", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name.replace("-", "_")] = metadata.version(name)
    return versions
