"""What `extract` writes, resumes and refuses; without vLLM, with a fake engine in this process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import BATCH, LENGTHS, SEQ_LENGTH, FakeEngine, digests, run

from vllm_compat.extraction import manifest as journals
from vllm_compat.extraction import processes, space, store
from vllm_compat.extraction.manifest import JOURNAL, ManifestError, read_manifest, read_records


@pytest.mark.usefixtures("in_process")
def test_files_have_the_format_of_the_official_script(settings: Any) -> None:
    import torch

    report = run(settings())
    out = settings().output_dir
    assert (report.outcome, report.samples, report.files_written) == ("complete", 11, 11)
    assert report.tokens == sum(min(each, SEQ_LENGTH - 1) for each in LENGTHS) == report.tokens_computed
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*(f"data_{number}.pt" for number in range(11)), "data_config.json", "manifest.json", JOURNAL, ".extract.lock"]
    )
    for number, length in enumerate(LENGTHS):
        sample = torch.load(out / f"data_{number}.pt", weights_only=True, mmap=True)
        assert list(sample) == ["input_ids", "hidden_states", "loss_mask"]
        cut = min(length, SEQ_LENGTH - 1)
        assert sample["input_ids"].tolist() == list(range(1000 * number + 7, 1000 * number + 7 + cut))
        assert sample["loss_mask"].tolist() == [each % 2 for each in sample["input_ids"].tolist()]
        assert sample["loss_mask"].dtype == sample["input_ids"].dtype == torch.long
        assert [layer.shape for layer in sample["hidden_states"]] == [(cut, 8)] * 2
        assert all(layer.is_contiguous() and layer.dtype == torch.bfloat16 for layer in sample["hidden_states"])
    config = json.loads((out / "data_config.json").read_text())
    assert config["data"]["num_samples"] == 11
    assert config["command"] == ["extract", "--flag"]

    manifest, records = read_manifest(out), read_records(out)
    assert manifest is not None
    assert manifest.complete
    assert manifest.files == {
        "journal": JOURNAL,
        "journal_bytes": (out / JOURNAL).stat().st_size,
        "journal_sha256": store.sha256_of(out / JOURNAL),
        "count": 11,
        "tokens": report.tokens,
        "bytes": report.bytes_written,
    }
    assert {name: record.sha256 for name, record in records.items()} == digests(out)
    assert [record.batch for record in records.values()] == [number // BATCH for number in range(11)]
    assert manifest.states == {"layer_ids": [1, 3], "hidden_size": 8, "dtype": "torch.bfloat16"}
    assert [session["outcome"] for session in manifest.sessions] == ["complete"]
    assert manifest.patches == ["a-patch"]


@pytest.mark.usefixtures("in_process")
def test_prompts_checksum_can_be_had_from_the_files(settings: Any) -> None:
    import torch

    from vllm_compat.extraction.dataset import add_prompt

    run(settings())
    digest = hashlib.sha256()
    for number in range(len(LENGTHS)):
        sample = torch.load(settings().output_dir / f"data_{number}.pt", weights_only=True)
        add_prompt(digest, sample["input_ids"].numpy(), sample["loss_mask"].numpy())
    manifest = read_manifest(settings().output_dir)
    assert manifest is not None
    assert manifest.request["prompts_sha256"] == digest.hexdigest()


@pytest.mark.usefixtures("in_process")
def test_a_complete_folder_loads_no_model(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(settings())
    before = digests(first_folder := settings().output_dir)
    monkeypatch.setattr(processes, "ProcessReplica", None)
    report = run(settings())
    assert (report.outcome, report.files_before, report.files_written) == ("complete", 11, 0)
    assert digests(first_folder) == before
    assert first.tokens == report.tokens


@pytest.mark.usefixtures("in_process")
def test_start_idx_is_added(settings: Any) -> None:
    """v0.3.0's script subtracts it, and skips or repeats samples."""
    run(settings())
    run(settings(output_dir=settings().output_dir.with_name("other"), start_idx=100))
    expected = {f"data_{int(name[5:-3]) + 100}.pt": digest for name, digest in digests(settings().output_dir).items()}
    assert digests(settings().output_dir.with_name("other")) == expected


@pytest.mark.usefixtures("in_process")
def test_holes_and_broken_files_are_mended_and_whole_batches_computed(settings: Any) -> None:
    run(settings())
    out = settings().output_dir
    expected = digests(out)
    (out / "data_4.pt").unlink()
    with (out / "data_8.pt").open("r+b") as file:
        file.truncate(500)
    content = bytearray((out / "data_10.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (out / "data_10.pt").write_bytes(content)
    (out / "data_11.pt").write_bytes(b"of another set")
    (out / ".data_4.pt.00000000.tmp").write_bytes(b"half")
    report = run(settings())
    assert digests(out) == expected
    assert (report.files_before, report.files_written, report.unfinished) == (8, 3, 1)
    assert report.quarantined == ["data_8.pt", "data_10.pt", "data_11.pt"]
    assert report.batches_again == 3
    assert report.differing == []
    assert sorted(path.name for path in (out / "quarantine").iterdir()) == [
        *("data_10.pt.0.broken", "data_11.pt.0.broken", "data_8.pt.0.broken")
    ]


@pytest.mark.usefixtures("in_process")
def test_a_quick_scan_looks_at_sizes_only(settings: Any) -> None:
    run(settings())
    path = settings().output_dir / "data_10.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(settings(quick_scan=True)).quarantined == []
    assert run(settings()).quarantined == ["data_10.pt"]


@pytest.mark.usefixtures("in_process")
def test_files_that_come_out_otherwise_are_told(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not compute the same twice."""
    run(settings())
    (settings().output_dir / "data_4.pt").unlink()
    original = FakeEngine.generate

    def otherwise(self: Any, prompts: Any) -> Any:
        results = original(self, prompts)
        results[2]["hidden_states"][0] += 1
        return results

    monkeypatch.setattr(FakeEngine, "generate", otherwise)
    report = run(settings())
    assert report.differing == ["data_5.pt"]
    assert "does not compute the same twice" in report.warnings[0]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_length": 16}, "seq_length is 16, the folder has 32"),
        ({"batch_size": 4}, "batch_size is 4, the folder has 3"),
        ({"layer_ids": (1, 2)}, r"layer_ids is \[1, 2\], the folder has \[1, 3\]"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"start_idx": 1}, "start_idx is 1"),
    ],
)
def test_a_resume_must_ask_for_the_same(settings: Any, change: dict[str, Any], said: str) -> None:
    run(settings())
    before = digests(settings().output_dir)
    with pytest.raises(ManifestError, match=said):
        run(settings(**change))
    assert digests(settings().output_dir) == before


def test_other_peoples_files_are_left_alone(settings: Any) -> None:
    out = settings().output_dir
    out.mkdir()
    (out / "data_0.pt").write_bytes(b"of the official script")
    with pytest.raises(ManifestError, match="1 data files and no manifest"):
        run(settings())
    assert (out / "data_0.pt").read_bytes() == b"of the official script"


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ProcessReplica", None)
    real = os.statvfs

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 3, 4096, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(space.SpaceError, match=r"11 files with .* tokens need .* 12.0 KiB are free.*are missing"):
        run(settings())
    monkeypatch.setattr(os, "statvfs", real)
    assert not (settings().output_dir / "manifest.json").exists()


def test_a_dry_run_changes_nothing(settings: Any) -> None:
    report = run(settings(dry_run=True))
    assert (report.outcome, report.samples) == ("planned", 11)
    assert report.bytes_needed > 0
    assert not settings().output_dir.exists()


@pytest.mark.parametrize("tokens", [1, 17, 500, 2047])
@pytest.mark.parametrize("layers", [1, 4, 9])
def test_the_plan_is_never_less_than_the_file(tmp_path: Path, tokens: int, layers: int) -> None:
    import torch

    sample = {
        "input_ids": torch.zeros(tokens, dtype=torch.long),
        "hidden_states": [torch.zeros(tokens, 64, dtype=torch.bfloat16) for _ in range(layers)],
        "loss_mask": torch.zeros(tokens, dtype=torch.long),
    }
    size, _ = store.save_sample(tmp_path / "data_0.pt", sample)
    planned = space.file_size(tokens, layers=layers, hidden_size=64)
    assert size <= planned <= size + 2 * space.BLOCK + space.FILE_OVERHEAD


@pytest.mark.usefixtures("in_process")
def test_replicas_that_do_not_run_the_same_are_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeEngine.__init__
    numbers: Iterator[int] = iter(range(9))

    def other(self: Any, given: Any) -> None:
        original(self, given)
        self.versions = {"vllm": f"0.{next(numbers)}"}

    monkeypatch.setattr(FakeEngine, "__init__", other)
    with pytest.raises(RuntimeError, match=r"replicas do not run the same: versions: .*0\.[01].* in process \d+ on "):
        run(settings(data_parallel=2))


@pytest.mark.usefixtures("in_process")
def test_a_disk_that_is_full_for_the_journal_is_the_error(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left over in the file's buffer does not raise once more while the session is closed."""
    original = journals.Journal.__init__

    def full(self: Any, *args: Any) -> None:
        original(self, *args)
        self._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")

    monkeypatch.setattr(journals.Journal, "__init__", full)
    with pytest.raises(OSError, match=rf"No space left on device: .*{JOURNAL}"):
        run(settings())
    found = read_manifest(settings().output_dir)
    assert found is not None
    assert found.sessions[-1]["outcome"] == "failed"
