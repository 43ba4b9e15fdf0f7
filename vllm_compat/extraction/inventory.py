"""What a folder of hidden states says about itself: which files there should be, of which layers, made with what.

Both kinds of folders are understood: those of `vllm-compat extract`, with a manifest, and those of speculators v0.3.0's
own script, whose only description is `data_config.json`, written when the script has come to its end. No data file is
opened here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_compat.extraction.faults import Fault
from vllm_compat.extraction.kernels import cut_of
from vllm_compat.extraction.manifest import (
    HEADER,
    JOURNAL,
    FileRecord,
    Manifest,
    ManifestError,
    read_manifest,
    read_records,
)
from vllm_compat.extraction.store import CONFIG, DATA_FILE, data_file, number_of, scan, sha256_of


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is used of `data_config.json`."""

    layer_ids: tuple[int, ...]  # ascending
    hidden_size: int
    model: str
    samples: int
    versions: Mapping[str, str]
    gpu: str  # "CPU only" if there was none


@dataclass(kw_only=True)
class Folder:
    """A folder as it was found; `faults` are those that show without a look into the data files."""

    path: Path
    names: list[str]  # of the data files that are there, by number
    config: Config | None = None
    manifest: Manifest | None = None
    records: Mapping[str, FileRecord] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """The layers that the files hold, ascending; None if nothing says so."""
        if self.manifest is not None and self.manifest.states is not None:
            return _ascending(self.manifest.states["layer_ids"])
        return None if self.config is None else self.config.layer_ids

    @property
    def made_with(self) -> Mapping[str, str]:
        """The packages that made the files, as far as it is known."""
        if self.manifest is not None:
            return self.manifest.versions
        return {} if self.config is None else self.config.versions

    @property
    def cut(self) -> float:
        """How much coarser than rounding the kernels were that made the files; see `kernels`."""
        return 1.0 if self.config is None else cut_of(self.made_with.get("vllm", ""), cpu=self.config.gpu == "CPU only")


def look(path: Path) -> Folder:
    """Read the folder's descriptions and compare them with the names and sizes of its files."""
    with os.scandir(path) as entries:
        names = sorted((each.name for each in entries if DATA_FILE.fullmatch(each.name)), key=number_of)
    found = Folder(path=path, names=names)
    _read_config(found)
    _read_manifest(found)
    if found.manifest is not None:
        try:
            _compare_with_manifest(found, found.manifest)
        except (KeyError, TypeError, ValueError, OSError) as error:
            what = f"{HEADER} is not what vllm-compat extract writes"
            found.faults.append(Fault("manifest", what, example=f"{type(error).__name__}: {error}"))
            found.manifest = None
    elif names:
        _look_for_holes(found)
    _look_for_strays(found)
    return found


def _ascending(layer_ids: Iterable[int]) -> tuple[int, ...]:
    """As the files hold them: the generator answers in the model's order, each layer once, whatever was asked for."""
    return tuple(sorted({int(each) for each in layer_ids}))


def _read_config(found: Folder) -> None:
    try:
        content = json.loads((found.path / CONFIG).read_text(encoding="utf-8"))
        found.config = Config(
            layer_ids=_ascending(content["hidden_states"]["layer_ids"]),
            hidden_size=int(content["model"]["hidden_size"]),
            model=str(content["model"]["target_model_path"]),
            samples=int(content["data"]["num_samples"]),
            versions=dict(content["reproducibility"]["package_versions"]),
            gpu=str(content["reproducibility"]["gpu"]),
        )
    except FileNotFoundError:
        found.notes.append(f"there is no {CONFIG}: the run that made the files did not come to its end")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{CONFIG} is not what speculators v0.3.0 writes"
        found.faults.append(Fault("config", what, example=f"{type(error).__name__}: {error}"))


def _read_manifest(found: Folder) -> None:
    try:
        found.manifest = read_manifest(found.path)
        found.records = read_records(found.path)
    except ManifestError as error:
        found.faults.append(Fault("manifest", str(error)))


def _compare_with_manifest(found: Folder, manifest: Manifest) -> None:
    """Every file that was promised is there with its size, and no other is. What the manifest lacks raises KeyError,
    TypeError or ValueError."""
    first, samples = int(manifest.request["start_idx"]), int(manifest.request["num_samples"])
    if manifest.files is None:
        found.faults.append(
            Fault("incomplete", "the extraction did not come to its end: run the same `vllm-compat extract` again")
        )
    elif sha256_of(found.path / JOURNAL) != manifest.files["journal_sha256"]:
        found.faults.append(Fault("manifest", f"{JOURNAL} is not the one that {HEADER} was written for"))
    recorded = None if manifest.states is None else _ascending(manifest.states["layer_ids"])
    if found.config is not None and recorded not in (None, found.config.layer_ids):
        what = f"{CONFIG} and {HEADER} name different layers"
        found.faults.append(Fault("config", what, example=f"{list(found.config.layer_ids)} and {list(recorded or ())}"))
    wanted = [data_file(first + number) for number in range(samples)]
    state = scan(found.path, found.records, wanted, contents=False)
    lost = {*state.missing, *(name for name in wanted if name not in found.records)} - {*state.unrecorded}
    found.faults += [Fault("missing-file", "is missing", name) for name in sorted(lost, key=number_of)]
    found.faults += [
        Fault("changed-file", "is not as it was written", name, example=said) for name, said in state.broken.items()
    ]
    found.faults += [Fault("unexpected-file", "is not of this extraction", name) for name in state.foreign]
    if manifest.complete:
        what = f"is not in {JOURNAL}"
        found.faults += [Fault("unexpected-file", what, name) for name in state.unrecorded]


def _look_for_holes(found: Folder) -> None:
    """Without a manifest: numbers start at 0 and leave none out, up to the number of samples if that is known."""
    there = {number_of(name) for name in found.names}
    last = max(there)
    samples = None if found.config is None else found.config.samples
    if samples is not None and samples < len(there):
        found.notes.append(f"{len(there)} files, but {CONFIG} tells of {samples} samples: files of several runs?")
    found.faults += [
        Fault("missing-file", "is missing", data_file(number))
        for number in range(max(last + 1, samples or 0))
        if number not in there
    ]


def _look_for_strays(found: Folder) -> None:
    """speculators' trainer reads everything below the folder whose name ends in `pt`, whatever it is."""
    for place, _folders, files in os.walk(found.path):
        for name in files:
            path = Path(place) / name
            if name.endswith("pt") and not (path.parent == found.path and DATA_FILE.fullmatch(name)):
                what = "is no sample, but speculators' trainer would read it as one: move it away"
                found.faults.append(Fault("unexpected-file", what, str(path.relative_to(found.path))))


def describe(found: Folder) -> str:
    """Who made the folder, in a few words."""
    versions = ", ".join(
        f"{name} {found.made_with[name]}" for name in ("vllm_compat", "speculators", "vllm") if name in found.made_with
    )
    maker = "vllm-compat extract" if found.manifest is not None else "speculators' script, no manifest"
    return f"{maker} ({versions})" if versions else maker
