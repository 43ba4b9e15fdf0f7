"""`verify` finds and names every fault that was planted, and passes what is right, prompts that repeat themselves too.

The files hold what Hugging Face computes in float32, rounded to bfloat16; `verify` recomputes in bfloat16. So the
values differ as those of another implementation do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_files import random_prompt, save_sample

from vllm_compat.extraction import verify as command
from vllm_compat.extraction.judge import check_whole
from vllm_compat.extraction.manifest import JOURNAL, FileRecord, Journal, Manifest, read_records, write_manifest
from vllm_compat.extraction.model import look_at
from vllm_compat.extraction.reference import Reference
from vllm_compat.extraction.samples import Unfit, read_sample
from vllm_compat.extraction.store import sha256_of
from vllm_compat.extraction.tiny import make_model
from vllm_compat.extraction.verification import Options, Refused, verify

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, LAYER_IDS = 8, [2, 4, 5, 7]  # speculators' own choice for eight layers
LENGTHS = (30, 24, 30, 41, 26)


# Files 0 and 2 are equally long. From 5 on: one token over and over; two in turn; a prompt twice; a common beginning.
PROMPTS = [
    *(random_prompt(length, seed) for seed, length in enumerate(LENGTHS)),
    [77] * 40,
    [5, 9] * 15,
    random_prompt(20, 90),
    random_prompt(20, 90),
    [*random_prompt(16, 90), *random_prompt(9, 91)],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", layers=LAYERS, dtype="bfloat16")


@pytest.fixture(scope="module")
def exact(model: Path) -> Reference:
    return Reference(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, exact: Reference, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    for number, prompt in enumerate(PROMPTS):
        save_sample(folder, number, prompt, [states.bfloat16() for states in exact.states(prompt, LAYER_IDS)])
    _describe(folder, model, LAYER_IDS, len(PROMPTS))
    return folder


def _describe(folder: Path, model: Path, layer_ids: list[int], samples: int, vllm: str = "0.16.0") -> None:
    """As much of speculators' data_config.json as anybody reads."""
    config = {
        "hidden_states": {"layer_ids": layer_ids},
        "model": {"hidden_size": 64, "target_model_path": str(model)},
        "data": {"num_samples": samples},
        "reproducibility": {"gpu": "CPU only", "package_versions": {"vllm": vllm, "speculators": "0.3.0"}},
    }
    (folder / "data_config.json").write_text(json.dumps(config))


FEW = 4


@pytest.fixture
def data(clean: Path, model: Path, tmp_path: Path) -> Path:
    """A copy of the first files, to plant faults in."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(FEW):
        shutil.copy(clean / f"data_{number}.pt", folder)
    _describe(folder, model, LAYER_IDS, FEW)
    return folder


def _verify(model: Path, folder: Path, **options: Any) -> Any:
    return verify(Options(model=str(model), folder=folder, **options))


def _change(folder: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / f"data_{number}.pt"
    sample = torch.load(path, weights_only=True)
    change(sample)
    torch.save(sample, path)


def _every_layer(change: Callable[[Any], Any], *layers: int) -> Callable[[dict[str, Any]], None]:
    """Change the states of the `layers` given by their place; of all if none is."""

    def apply(sample: dict[str, Any]) -> None:
        for place in layers or range(len(LAYER_IDS)):
            sample["hidden_states"][place] = change(sample["hidden_states"][place]).contiguous()

    return apply


def test_clean_data_pass(model: Path, clean: Path) -> None:
    verdict = _verify(model, clean)
    assert verdict.ok, verdict.as_text()
    assert list(verdict.recomputed) == [f"data_{number}.pt" for number in range(len(PROMPTS))]
    assert verdict.report.rows == sum(map(len, PROMPTS))
    assert [layer.layer_id for layer in verdict.report.layers] == LAYER_IDS
    for layer in verdict.report.layers:
        assert layer.rows == verdict.report.rows
        assert 0 < layer.max_relative_error < layer.tolerance
    text = verdict.as_text()
    assert text.splitlines()[-1] == "OK: every row belongs to its prompt, its position and its layer."
    assert "vllm 0.16.0" in text
    assert "2 files hold prompts that others hold too" in text


def test_rows_that_are_equal_by_right_are_no_fault(model: Path, tmp_path: Path, exact: Reference) -> None:
    """A prompt of one token over and over: every row is the first one's twin, and nothing could tell them apart."""
    prompt = [77] * 200
    save_sample(tmp_path, 0, prompt, [states.bfloat16() for states in exact.states(prompt, LAYER_IDS)])
    verdict = _verify(model, tmp_path)
    assert verdict.ok, verdict.as_text()
    assert all(layer.undecided > 20 for layer in verdict.report.layers)
    assert any("cannot be told from another" in note for note in verdict.notes)
    assert verdict.report.margin > 0, "the margin is that of rows that can be told"


def _roll(rows: Any) -> Any:
    return rows.roll(1, dims=0)


def _late_shift(rows: Any) -> Any:
    return torch.cat([rows[:12], rows[11:-1]])


def _swap(rows: Any) -> Any:
    return rows[[0, 1, 2, 3, 4, 6, 5, *range(7, len(rows))]]


def _mix(rows: Any) -> Any:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


def _nan(rows: Any) -> Any:
    rows[7, 3] = torch.nan
    return rows


def _zero(rows: Any) -> Any:
    rows[9:] = 0
    return rows


PLANTED = {
    "shifted": (_every_layer(_roll), "shifted-rows", LAYER_IDS, "rows look shifted by +1"),
    "shifted back in one layer": (
        _every_layer(lambda rows: rows.roll(-2, dims=0), 1),
        "shifted-rows",
        [4],
        "rows look shifted by -2",
    ),
    "shifted from a row on": (_every_layer(_late_shift), "shifted-rows", LAYER_IDS, "row 12 holds row 11's states"),
    "swapped": (_every_layer(_swap), "swapped-rows", LAYER_IDS, "row 5 holds row 6's states"),
    "swapped in one layer": (_every_layer(_swap, 3), "swapped-rows", [7], "rows look swapped in pairs"),
    "in another order": (_every_layer(_mix), "misplaced-rows", LAYER_IDS, "rows look out of order"),
    "not finite": (_every_layer(_nan, 2), "not-finite", [5], "layer 5: holds values that are not finite"),
    "never written": (_every_layer(_zero, 0), "zero-rows", [2], "(21 rows, for example row 9)"),
    "multiplied": (_every_layer(lambda rows: rows * 1.5), "scaled", LAYER_IDS, "by 1.5"),
    "imprecise": (
        _every_layer(
            lambda rows: (
                rows + rows.std() * 0.2 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
            )
        ),
        "inexact",
        LAYER_IDS,
        "is allowed",
    ),
    "one row of another layer": (
        lambda sample: sample["hidden_states"][1].__setitem__(4, sample["hidden_states"][0][4]),
        "wrong-layer",
        [4],
        "looks like layer 2 (1 row, for example row 4)",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str, model: Path, data: Path) -> None:
    plant, kind, layer_ids, said = PLANTED[name]
    _change(data, 0, plant)
    verdict = _verify(model, data)
    assert not verdict.ok
    (group,) = verdict.faults.groups
    assert (group.fault.kind, list(group.fault.layer_ids)) == (kind, layer_ids), group.text
    assert group.files == ["data_0.pt"]
    assert said in group.text
    assert f"FAULT {kind}: data_0.pt: layer" in verdict.as_text()
    assert verdict.as_text().splitlines()[-1].startswith("FAILED: 1 kind(s) of faults")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([2, 3, 5, 7], {"data_0.pt: layer 4: looks like layer 3"}),
        ([2, 5, 4, 7], {"data_0.pt: layer 4: looks like layer 5", "data_0.pt: layer 5: looks like layer 4"}),
        ([2, 4, 5, 0], {"data_0.pt: layer 7: looks like layer 0"}),
        ([-1, 4, 5, 7], {"data_0.pt: layer 2: looks like the embeddings"}),
        ([1, 3, 4, 6], {"data_0.pt: layers 2, 4, 5, 7: each looks like the layer -1 from it: numbered otherwise"}),
    ],
)
def test_states_of_another_layer(held: list[int], said: set[str], model: Path, data: Path, exact: Reference) -> None:
    save_sample(data, 0, PROMPTS[0], [states.bfloat16() for states in exact.states(PROMPTS[0], held)])
    verdict = _verify(model, data)
    groups = verdict.faults.groups
    assert {group.fault.kind for group in groups} == {"wrong-layer"}
    assert len(groups) == len(said)
    for text in said:
        assert any(text in group.text for group in groups), verdict.as_text()


def test_the_last_layer_after_the_final_norm(model: Path, data: Path, exact: Reference) -> None:
    """In all files, as code that takes `output_hidden_states` would have written them."""
    for number, prompt in enumerate(PROMPTS[:FEW]):
        states = exact.states(prompt, LAYER_IDS)
        save_sample(data, number, prompt, [states.bfloat16() for states in (*states[:-1], exact.normed(states[-1]))])
    verdict = _verify(model, data)
    (group,) = verdict.faults.groups
    assert (group.fault.kind, group.fault.layer_ids, group.count) == ("normed", (7,), FEW)
    assert "data_0.pt and 3 other files: layer 7: looks normed: the model's final norm was applied" in group.text


@pytest.mark.parametrize("files", [16, 1])
def test_rows_of_another_prompt(files: int, model: Path, data: Path) -> None:
    """Also where the other prompt's file is not among those that were chosen."""
    other = torch.load(data / "data_2.pt", weights_only=True)["hidden_states"]
    _change(data, 0, lambda sample: sample.update(hidden_states=other))
    if files == 1:  # make sure that it is the one that is chosen
        seed = next(seed for seed in range(99) if _chosen(seed, FEW) == 0)
    else:
        seed = 0
    verdict = _verify(model, data, files=files, seed=seed)
    (group,) = verdict.faults.groups
    assert (group.fault.kind, list(group.fault.layer_ids), group.files) == ("other-prompt", LAYER_IDS, ["data_0.pt"])
    assert "of data_2.pt" in group.text


def _chosen(seed: int, files: int) -> int:
    import random

    return random.Random(seed).sample(range(files), 1)[0]


def test_some_rows_of_another_prompt(model: Path, data: Path) -> None:
    other = torch.load(data / "data_3.pt", weights_only=True)["hidden_states"]
    _change(
        data,
        0,
        lambda sample: [
            each[20:].copy_(from_[5:15]) for each, from_ in zip(sample["hidden_states"], other, strict=True)
        ],
    )
    (group,) = _verify(model, data).faults.groups
    assert (group.fault.kind, group.fault.rows) == ("other-prompt", 10)
    assert "of data_3.pt" in group.text


def test_states_of_another_model(model: Path, data: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", layers=LAYERS, dtype="bfloat16", seed=1)
    verdict = _verify(other, data)
    assert {group.fault.kind for group in verdict.faults.groups} >= {"other-model", "unexplained"}
    assert "no layer of any file fits" in verdict.as_text()


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    """One bit in the middle of a tensor, so that torch reads it without a word."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(content)


def _pickle(path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps({"input_ids": [1]}))


class _Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


def _evil(path: Path) -> None:
    torch.save({"input_ids": _Evil(), "hidden_states": [], "loss_mask": None}, path)


@pytest.mark.parametrize(
    ("plant", "kind", "said"),
    [
        (_truncate, "truncated-file", "is cut short or was never finished"),
        (_empty, "truncated-file", "0 bytes"),
        (_flip, "damaged-file", "has other bytes than were written (CRC-32 of data_0/data/"),
        (_pickle, "truncated-file", "the end is missing"),
        (_evil, "damaged-file", "cannot be read as a file of tensors"),
        (Path.unlink, "missing-file", "data_0.pt: is missing"),
    ],
)
def test_files_that_are_not_whole(plant: Callable[[Path], None], kind: str, said: str, model: Path, data: Path) -> None:
    plant(data / "data_0.pt")
    verdict = _verify(model, data)
    groups = [group for group in verdict.faults.groups if group.fault.kind == kind]
    assert len(groups) == 1, verdict.as_text()
    assert said in groups[0].text
    assert groups[0].files == ["data_0.pt"]
    assert "data_1.pt" in verdict.recomputed, "the others are judged all the same"


def test_damage_anywhere_is_found_and_stops_nothing(data: Path) -> None:
    """A bit flipped, or the file cut, at many places: read as sound only where the bytes mean nothing."""
    path = data / "data_1.pt"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        tensors = [(each.header_offset, each.file_size) for each in archive.infolist() if "/data/" in each.filename]
    # What stands before a tensor is its header and padding, in which much means nothing.
    inside = [(offset + 1000, offset + size) for offset, size in tensors if size > 1000]
    assert len(inside) == len(LAYER_IDS)

    def found() -> bool:
        try:
            read_sample(path)
        except Unfit:
            return True
        return bool(check_whole(path, None))

    for place in range(0, len(whole), 53):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        if any(first <= place < end for first, end in inside):
            assert found(), place
        else:
            found()
        path.write_bytes(whole[:place])
        assert found(), place
    path.write_bytes(whole)
    assert not found()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (_every_layer(lambda rows: rows.float()), "wrong-dtype", "is torch.float32, most files are torch.bfloat16"),
        (_every_layer(lambda rows: rows.half(), 1), "wrong-dtype", "layers are torch.bfloat16, torch.float16"),
        (_every_layer(lambda rows: rows.double()), "wrong-dtype", "layers are torch.float64"),
        (_every_layer(lambda rows: rows[:-1], 1), "wrong-format", "tensor 1: 29 rows, 30 tokens"),
        (_every_layer(lambda rows: rows[:, :-1]), "wrong-format", "a row must have 64 values (tensor 0: 63)"),
        (lambda sample: sample["hidden_states"].pop(), "wrong-format", "must hold 4 layers (it holds 3)"),
        (lambda sample: sample.pop("loss_mask"), "wrong-format", "must hold input_ids, hidden_states, loss_mask"),
        (lambda sample: sample.update(loss_mask=sample["loss_mask"][:-1]), "wrong-format", "29 and 30"),
        (lambda sample: sample.update(input_ids=sample["input_ids"].float()), "wrong-format", "torch.float32 [30]"),
        (lambda sample: sample["input_ids"].__setitem__(4, 512), "token-id", "row 4: 512"),
    ],
)
def test_files_of_another_form(change: Any, kind: str, said: str, model: Path, data: Path) -> None:
    _change(data, 0, change)
    (group,) = _verify(model, data).faults.groups
    assert (group.fault.kind, group.files) == (kind, ["data_0.pt"])
    assert said in group.text


def test_a_conversion_of_all_files_is_found(model: Path, data: Path) -> None:
    for number in range(FEW):
        _change(data, number, _every_layer(lambda rows: rows.float()))
    verdict = _verify(model, data)
    (group,) = verdict.faults.groups
    assert (group.fault.kind, group.count) == ("wrong-dtype", FEW)
    assert "values have bfloat16's precision, stored as float32" in group.text
    assert "the model's weights are torch.bfloat16, the states torch.float32" in verdict.as_text()


def test_holes_strays_and_files_of_several_runs(model: Path, data: Path) -> None:
    (data / "data_1.pt").unlink()
    (data / "data_3.pt").unlink()
    (data / "old").mkdir()
    shutil.copy(data / "data_0.pt", data / "old" / "data_0.pt")
    torch.save({}, data / "token_freq.pt")
    groups = {group.fault.kind: group for group in _verify(model, data, files=1).faults.groups}
    assert groups.keys() == {"missing-file", "unexpected-file"}
    assert groups["missing-file"].files == ["data_1.pt", "data_3.pt"]  # a hole, and the end that the config promises
    assert sorted(groups["unexpected-file"].files) == ["old/data_0.pt", "token_freq.pt"]
    _describe(data, model, LAYER_IDS, 1)
    assert any("files of several runs" in note for note in _verify(model, data, files=1).notes)


@pytest.fixture
def extracted(data: Path, model: Path) -> Path:
    """The same files as `vllm-compat extract` leaves them."""
    journal = Journal(data)
    for number in range(FEW):
        path = data / f"data_{number}.pt"
        size, digest = path.stat().st_size, sha256_of(path)
        tokens = len(PROMPTS[number])
        journal.add([FileRecord(file=path.name, sample=number, batch=0, tokens=tokens, bytes=size, sha256=digest)])
    manifest = Manifest(
        request={"start_idx": 0, "num_samples": FEW, "model_sha256": look_at(str(model)).sha256},
        states={"layer_ids": LAYER_IDS, "hidden_size": 64, "dtype": "torch.bfloat16"},
        versions={"vllm_compat": "0.1.0", "vllm": "0.17.0"},
        files=journal.finish(),
    )
    write_manifest(data, manifest)
    return data


def test_a_folder_with_a_manifest_passes(model: Path, extracted: Path) -> None:
    verdict = _verify(model, extracted)
    assert verdict.ok, verdict.as_text()
    assert "by vllm-compat extract (vllm_compat 0.1.0, vllm 0.17.0)" in verdict.as_text()
    assert verdict.as_dict()["folder"]["manifest"] is True
    assert not verdict.notes
    request = json.loads((extracted / "manifest.json").read_text())["request"]
    _edit(extracted, request={**request, "model_sha256": "another"})
    verdict = _verify(model, extracted, files=1)
    assert verdict.ok, "the rows say that it is the model, whatever its files are called"
    assert "is not the very model of manifest.json" in verdict.as_text()


def _other_bytes(folder: Path) -> None:
    """A sound file that is not the one that was written: its own checksums fit."""
    _change(folder, 0, lambda sample: sample["loss_mask"].__setitem__(0, 0))
    assert (folder / "data_0.pt").stat().st_size == read_records(folder)["data_0.pt"].bytes


def _lost_line(folder: Path) -> None:
    lines = (folder / JOURNAL).read_text().splitlines(keepends=True)
    (folder / JOURNAL).write_text("".join(lines[1:]))


def _edit(folder: Path, **fields: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (_other_bytes, {"changed-file": "data_0.pt: is not as it was written (SHA-256)"}),
        (lambda folder: _truncate(folder / "data_0.pt"), {"changed-file": "were written", "truncated-file": "data_0"}),
        (lambda folder: (folder / "data_0.pt").unlink(), {"missing-file": "data_0.pt: is missing"}),
        (
            lambda folder: shutil.copy(folder / "data_0.pt", folder / "data_7.pt"),
            {"unexpected-file": "data_7.pt: is not of this extraction"},
        ),
        (_lost_line, {"manifest": "is not the one that manifest.json", "unexpected-file": "is not in manifest.files"}),
        (lambda folder: _edit(folder, files=None), {"incomplete": "run the same `vllm-compat extract` again"}),
        (lambda folder: _edit(folder, request={}), {"manifest": "is not what vllm-compat extract writes"}),
        (lambda folder: _edit(folder, schema=2), {"manifest": "has schema 2, this vllm_compat reads 1"}),
        (
            lambda folder: _edit(folder, states={"layer_ids": [1, 4, 5, 7]}),
            {"config": "name different layers", "wrong-layer": "layer 1: looks like layer 2"},
        ),
        (lambda folder: _edit(folder, states={}), {"manifest": "is not what vllm-compat extract writes"}),
    ],
)
def test_what_the_manifest_promises(plant: Any, faults: dict[str, str], model: Path, extracted: Path) -> None:
    plant(extracted)
    verdict = _verify(model, extracted)
    found = {group.fault.kind: group.text for group in verdict.faults.groups}
    assert found.keys() == faults.keys(), verdict.as_text()
    for kind, said in faults.items():
        assert said in found[kind]


def test_a_config_of_another_model(model: Path, data: Path) -> None:
    config = json.loads((data / "data_config.json").read_text())
    config["model"]["hidden_size"] = 128
    (data / "data_config.json").write_text(json.dumps(config))
    (group,) = _verify(model, data).faults.groups
    assert "the data are of a model with hidden size 128, this one has 64" in group.text
    (data / "data_config.json").write_text("{}")
    (group,) = _verify(model, data).faults.groups
    assert "data_config.json is not what speculators v0.3.0 writes" in group.text


def test_files_of_kernels_that_drop_bits(model: Path, data: Path) -> None:
    """Up to vLLM 0.13 those of the CPU build do: see `kernels`."""
    _describe(data, model, LAYER_IDS, FEW, vllm="0.13.0+cpu")
    old = _verify(model, data, files=1)
    assert old.ok
    assert "so 2 times the tolerance is allowed" in old.as_text()
    _describe(data, model, LAYER_IDS, FEW)
    new = _verify(model, data, files=1)
    for one, other in zip(old.report.layers, new.report.layers, strict=True):
        assert one.tolerance == 2 * other.tolerance


def test_the_choice_is_told_and_repeatable(model: Path, clean: Path) -> None:
    one, again = (_verify(model, clean, files=3, seed=5) for _ in range(2))
    assert list(one.recomputed) == list(again.recomputed)
    assert len(one.recomputed) == 3
    assert any(list(_verify(model, clean, files=3, seed=seed).recomputed) != list(one.recomputed) for seed in (6, 7))
    text = one.as_text()
    assert "10 opened, 3 read whole, 3 recomputed with Hugging Face (seed 5: " in text
    assert "fewer than 63.2% of the files are wrong, with 95 % certainty" in text  # 0.368 ** 3 = 0.05
    everything = _verify(model, clean, files=3, all=True, read_all=True)
    assert (len(everything.recomputed), everything.whole, everything.may_be_wrong) == (10, 10, 0)


def test_read_all_finds_damage_in_a_file_that_is_not_recomputed(model: Path, data: Path) -> None:
    chosen = _verify(model, data, files=1).recomputed
    (other,) = [f"data_{number}.pt" for number in (0, 1) if f"data_{number}.pt" not in chosen][:1]
    _flip(data / other)
    assert _verify(model, data, files=1).ok
    (group,) = _verify(model, data, files=1, read_all=True).faults.groups
    assert (group.fault.kind, group.files) == ("damaged-file", [other])


def test_layers_without_a_description(model: Path, data: Path, exact: Reference) -> None:
    (data / "data_config.json").unlink()
    verdict = _verify(model, data, files=1)
    assert verdict.ok
    assert "speculators' own choice for 8 layers" in verdict.as_text()
    assert "there is no data_config.json" in verdict.as_text()
    for number in range(FEW):
        _change(data, number, lambda sample: sample["hidden_states"].pop(0))
    with pytest.raises(Refused, match="give --layer-ids"):
        _verify(model, data)
    assert _verify(model, data, files=1, layer_ids=(4, 5, 7)).ok
    assert not _verify(model, data, files=1, layer_ids=(3, 5, 7)).ok


def test_layer_ids_in_any_order_mean_the_models_order(model: Path, data: Path) -> None:
    _describe(data, model, [7, 2, 5, 4, 2], FEW)
    assert _verify(model, data, files=1).ok


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"files": 0}, "files is 0"),
        ({"layer_ids": (4, 2)}, "must ascend"),
        ({"layer_ids": (2, 4, 5, 8)}, "layer 8 .from --layer-ids. is not one of the layers 0 to 7"),
    ],
)
def test_what_cannot_be_judged_is_refused(options: dict[str, Any], said: str, model: Path, clean: Path) -> None:
    with pytest.raises(Refused, match=said):
        _verify(model, clean, **options)


def test_folders_and_models_that_are_none(model: Path, clean: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is no folder"):
        _verify(model, tmp_path / "nowhere")
    with pytest.raises(Refused, match=r"has no data_N\.pt"):
        _verify(model, tmp_path)
    with pytest.raises(Refused, match="transformers cannot read a model from"):
        _verify(tmp_path, clean)


def _parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(args)


def test_without_a_folder_samples_are_extracted_by_a_child_process(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def extract(arguments: list[str], **_kwargs: Any) -> Any:
        """Stands for `vllm-compat extract`."""
        given = dict(zip(arguments[4::2], arguments[5::2], strict=True))
        assert arguments[1:4] == ["-m", "vllm_compat", "extract"]
        assert (given["--target-model-path"], given["--seq-length"], given["--batch-size"]) == (str(model), "128", "3")
        assert len(Path(given["--train-data-path"]).read_text().splitlines()) == 3
        shutil.copytree(data, given["--output-dir"])
        folders.append(Path(given["--output-dir"]))
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", extract)
    assert command.main(_parsed(str(model), "--samples", "3", "--seq-length", "128", "--files", "1")) == 0
    assert f"{FEW} recomputed with Hugging Face (seed 0: all)" in capsys.readouterr().out, "few as they are"
    assert not folders[0].exists()


def test_an_extraction_that_fails_is_the_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: subprocess.CompletedProcess([], 3))
    assert command.main(_parsed(str(model), "--json")) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "schema": 1,
        "ok": False,
        "error": "RuntimeError: the extraction ended with exit code 3; what it said is above",
    }
    assert command.main(_parsed(str(model), "--samples", "0", "--json")) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_command(model: Path, data: Path) -> None:
    """In a process of its own: exit codes, and stdout for the verdict alone."""
    _change(data, 0, _every_layer(_roll))
    (data / "data_2.pt").unlink()

    def run(*args: str) -> Any:
        words = [sys.executable, "-m", "vllm_compat", "verify", *args]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)

    done = run(str(model), str(data), "--json")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"], answer["layer_ids"]) == (1, False, LAYER_IDS)
    assert [(fault["kind"], fault["files"]) for fault in answer["faults"]] == [
        ("missing-file", ["data_2.pt"]),
        ("shifted-rows", ["data_0.pt"]),
    ]
    assert answer["files"]["recomputed"] == ["data_0.pt", "data_1.pt", "data_3.pt"]
    assert run(str(model), str(data / "nowhere")).returncode == 2
