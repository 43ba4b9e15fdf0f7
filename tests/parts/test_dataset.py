"""Every way that data come in, through the unmodified preprocessing of the consumer. No model is loaded."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction import dataset, extract, model, tiny
from vllm_compat.extraction.conversations import SHOWN, DataError
from vllm_compat.extraction.settings import Settings
from vllm_compat.extraction.store import sha256_of

SAMPLES, SEQ_LENGTH = 22, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, active: None) -> Path:
    made = tmp_path_factory.mktemp("data")
    tiny.make_model(made / "model", layers=2)
    tiny.make_tokenizer(made / "model")
    tiny.make_conversations(made / "chats.jsonl", SAMPLES, words=(20, 400))
    return made


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> Callable[..., Settings]:
    def build(data: str, **given: Any) -> Settings:
        asked = {
            "target_model_path": str(folder / "model"),
            "train_data_path": str(folder / data),
            "output_dir": tmp_path / "out",
            "token_freq_path": tmp_path / "token_freq.pt",
            "hf_cache_dir": str(tmp_path / "cache"),
            "seq_length": SEQ_LENGTH,
            "num_preprocessing_workers": 2,
        }
        return Settings(**{**asked, **given})

    return build


def load(settings: Settings) -> dataset.Samples:
    return dataset.load_samples(settings, warn=print)[0]


def test_samples_are_those_of_the_consumer(settings: Any, folder: Path, tmp_path: Path) -> None:
    import hashlib

    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    theirs, _ = load_and_preprocess_dataset(
        target_model_path=str(folder / "model"),
        train_data_path=str(folder / "chats.jsonl"),
        seq_length=SEQ_LENGTH,
        build_dataset_num_proc=1,
        token_freq_path=str(tmp_path / "their_freq.pt"),
        cache_dir=str(tmp_path / "their_cache"),
    )
    ours = load(settings("chats.jsonl"))
    assert len(ours) == len(theirs) == SAMPLES
    assert max(ours.lengths) == SEQ_LENGTH - 1, "none is cut: this test shows less than it says"
    digest = hashlib.sha256()
    for number in range(SAMPLES):
        (ids,), (mask,) = ours.get(number, number + 1)
        assert ids.tolist() == theirs[number]["input_ids"].tolist()
        assert mask.tolist() == theirs[number]["loss_mask"].tolist()
        assert ours.lengths[number] == min(len(ids), SEQ_LENGTH - 1)
        dataset.add_prompt(digest, ids[: SEQ_LENGTH - 1], mask[: SEQ_LENGTH - 1])
    assert ours.sha256 == digest.hexdigest()
    ids, _ = ours.get(3, 6)
    assert [each.tolist() for each in ids] == [theirs[number]["input_ids"].tolist() for number in range(3, 6)]
    import torch

    freq = [torch.load(tmp_path / name, weights_only=True) for name in ("their_freq.pt", "token_freq.pt")]
    assert freq[0] == freq[1]


def test_the_same_conversations_in_other_files(settings: Any, folder: Path) -> None:
    import datasets

    items = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    (folder / "list.json").write_text(json.dumps(items))
    rows = datasets.Dataset.from_list([{"messages": item["conversations"]} for item in items])
    rows.save_to_disk(str(folder / "on_disk"))
    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(str(folder / "splits"))
    expected = load(settings("chats.jsonl")).sha256
    for name in ("list.json", "on_disk", "splits"):
        assert load(settings(name)).sha256 == expected, name


def test_turn_dropout_comes_out_the_same_again(settings: Any, tmp_path: Path) -> None:
    """With a cold cache, as on another machine: Python seeds its global source anew in each process that forks."""
    kept = [
        load(settings("chats.jsonl", turn_dropout=True, hf_cache_dir=str(tmp_path / name))).sha256
        for name in ("one", "two")
    ]
    assert kept[0] == kept[1]
    other = settings("chats.jsonl", turn_dropout=True, seed=1, token_freq_path=tmp_path / "other.pt")
    assert load(other).sha256 != kept[0]


def test_a_dry_run_counts_and_leaves_no_file(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    frequencies = settings("chats.jsonl").token_freq_path
    load(settings("chats.jsonl", dry_run=True))
    assert not frequencies.exists()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert dataset.load_samples(settings("chats.jsonl"), warn=print)[1] == sha256_of(frequencies)
    with pytest.raises(DataError, match="has the token frequencies of other data"):
        load(settings("chats.jsonl", max_samples=5, dry_run=True))


def test_token_frequencies_of_other_data_are_not_kept(settings: Any, tmp_path: Path) -> None:
    _, counted = dataset.load_samples(settings("chats.jsonl"), warn=print)
    before = (tmp_path / "token_freq.pt").read_bytes()
    assert dataset.load_samples(settings("chats.jsonl"), warn=print)[1] == counted  # another output folder's run
    assert (tmp_path / "token_freq.pt").read_bytes() == before
    assert dataset.load_samples(settings("chats.jsonl"), warn=print, known_token_freq=counted)[1] == counted
    with pytest.raises(DataError, match=r"token_freq.pt has the token frequencies of other data or settings"):
        load(settings("chats.jsonl", max_samples=5))
    assert (tmp_path / "token_freq.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if "token_freq" in path.name] == ["token_freq.pt"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.jsonl", "there is no such file"),
        ("nope", "Unsupported dataset: .*nope"),
        (".", "expected a folder written by Dataset.save_to_disk"),
        ("nothing.jsonl", "no conversation of .*nothing.jsonl is left after preprocessing"),
        ("broken.jsonl", "broken.jsonl, line 23: not JSON"),
    ],
)
def test_what_is_no_data(settings: Any, folder: Path, name: str, said: str) -> None:
    (folder / "nothing.jsonl").write_text('{"conversations": [{"from": "tool", "value": "x"}]}\n')
    (folder / "broken.jsonl").write_text((folder / "chats.jsonl").read_text() + '{"conversations"\n')
    with pytest.raises(ValueError, match=said):
        load(settings(name))


def test_a_column_is_missing(settings: Any, folder: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "Hi"}]).save_to_disk(str(folder / "text"))
    with pytest.raises(DataError, match="has the columns text: expected conversations or messages"):
        load(settings("text"))


def test_images_are_told_in_the_plan_and_its_json(
    settings: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])
    told = "only their text is extracted; images are out of reach of speculators 0.3.0"
    items = [{"conversations": []}] * 12 + [chat | {"image": "cat.png"}] * 2
    (folder / "llava.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    asked = argparse.Namespace(**vars(settings("llava.jsonl", dry_run=True)), json=True)
    assert extract.main(asked) == 0
    out, err = capsys.readouterr()
    expected = f"{folder / 'llava.jsonl'}: 2 records have images (first: line 13): {told}"
    warnings = json.loads(out)["warnings"]
    assert (warnings[0], warnings[-1], len(warnings)) == (expected, "and 3 more such lines", SHOWN + 1)
    assert "".join(f"warning: {each}\n" for each in warnings) in err


def test_images_in_a_folder_are_told(settings: Any, folder: Path) -> None:
    import datasets

    chat = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])
    datasets.Dataset.from_list([chat | {"images": ["cat.png"]}] * 2).save_to_disk(str(folder / "seen"))
    told: list[str] = []
    dataset.load_samples(settings("seen"), warn=told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{folder / 'seen'} has the columns ")
    assert told[0].endswith("images: only their text is extracted; images are out of reach of speculators 0.3.0")


def test_a_model_whose_files_change_is_another(folder: Path, tmp_path: Path) -> None:
    import shutil

    looked = model.look_at(str(folder / "model"))
    assert looked.hidden_size == 64
    shutil.copytree(folder / "model", tmp_path / "model")
    assert model.look_at(str(tmp_path / "model")) == looked
    (tmp_path / "model" / "token_freq.pt").write_bytes(b"of a run in this folder: `--target-model-path .`")
    assert model.look_at(str(tmp_path / "model")) == looked
    with (tmp_path / "model" / "model.safetensors").open("ab") as weights:
        weights.write(b"0")
    assert model.look_at(str(tmp_path / "model")) != looked
    with pytest.raises(OSError, match="nowhere"):
        model.look_at(str(tmp_path / "nowhere"))
