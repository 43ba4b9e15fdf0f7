"""The demo without vLLM: its files, what it finds wrong with them, its verdict and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction import demo, demo_files
from vllm_compat.extraction.compare import LayerReport, Report
from vllm_compat.extraction.demo_verdict import Verdict
from vllm_compat.extraction.stages import Stages


class Samples:
    """As much of a data set as the demo uses."""

    def __init__(self, lengths: list[int]) -> None:
        import torch

        self.ids = [torch.arange(length) + 1001 * number for number, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: Any) -> dict[str, Any]:
        ids = self.ids[which]
        if isinstance(which, slice):
            return {"input_ids": ids, "loss_mask": [each % 2 for each in ids]}
        return {"input_ids": ids, "loss_mask": ids % 2}


class Generator:
    """Answers as the consumer does: prompts cut to leave room for a token, no mask; layers not contiguous."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.calls: list[int] = []

    def generate(self, token_ids: list[Any]) -> list[dict[str, Any]]:
        import torch

        self.calls.append(len(token_ids))
        cut = [ids[: self.longest] for ids in token_ids]
        return [
            {
                "input_ids": ids,
                "hidden_states": [torch.ones(4, len(ids), dtype=torch.bfloat16).T * layer for layer in (1, 2)],
                "loss_mask": None,
            }
            for ids in cut
        ]


def test_files_have_the_format_of_the_official_script(tmp_path: Path) -> None:
    import torch

    samples, generator = Samples([5, 9, 12, 7, 3]), Generator(longest=9)
    batches, seconds = demo_files.extract(generator, samples, 2, tmp_path / "out")
    assert generator.calls == [2, 2, 1]
    assert batches == [14, 16, 3]
    assert seconds > 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"data_{n}.pt" for n in range(5)]
    sample = torch.load(tmp_path / "out" / "data_2.pt", weights_only=True)
    assert list(sample) == ["input_ids", "hidden_states", "loss_mask"]
    assert sample["input_ids"].dtype == sample["loss_mask"].dtype == torch.long
    assert len(sample["input_ids"]) == len(sample["loss_mask"]) == 9
    assert [layer.shape for layer in sample["hidden_states"]] == [(9, 4)] * 2
    assert all(layer.is_contiguous() for layer in sample["hidden_states"])

    prompts, states, problems = demo_files.read_back(tmp_path / "out", samples, 10, 2, "torch.bfloat16")
    assert problems == []
    assert [len(prompt) for prompt in prompts] == [len(layers[0]) for layers in states] == [5, 9, 9, 7, 3]


def test_what_is_wrong_with_files_is_found(tmp_path: Path) -> None:
    import torch

    samples = Samples([5, 5, 5, 5, 5, 5])
    out = tmp_path / "out"
    demo_files.extract(Generator(longest=9), samples, 6, out)
    good = [torch.load(out / f"data_{number}.pt", weights_only=True) for number in range(6)]
    torch.save(good[1], out / "data_0.pt")
    torch.save({**good[1], "loss_mask": good[1]["loss_mask"][:-1]}, out / "data_1.pt")
    torch.save({**good[2], "hidden_states": good[2]["hidden_states"][:1]}, out / "data_2.pt")
    torch.save({**good[3], "hidden_states": [x.float() for x in good[3]["hidden_states"]]}, out / "data_3.pt")
    torch.save({"input_ids": good[4]["input_ids"]}, out / "data_4.pt")
    (out / "data_5.pt").rename(out / "data_6.pt")
    prompts, states, problems = demo_files.read_back(out, samples, 10, 2, "torch.bfloat16")
    assert problems == [
        "missing or unexpected files: data_5.pt, data_6.pt",
        "data_0.pt: input_ids are not those of sample 0",
        "data_0.pt: loss_mask is not that of sample 0",
        "data_1.pt: loss_mask is not that of sample 1",
        "data_2.pt: 1 layers of torch.bfloat16, expected 2 of torch.bfloat16",
        "data_3.pt: 2 layers of torch.float32, expected 2 of torch.bfloat16",
        "data_4.pt has the keys ['input_ids']",
    ]
    assert len(prompts) == len(states) == 6
    assert states[4] == states[5] == []


def _verdict(*problems: str, file_problems: tuple[str, ...] = ()) -> Verdict:
    layer = LayerReport(
        layer_id=3,
        rows=20,
        tolerance=0.06,
        max_abs_error=0.25,
        max_relative_error=0.01,
        min_cosine=0.9995,
        row_margin=0.7,
        layer_margin=None,
        not_finite=0,
        outside=0,
        misplaced=0,
        wrong_layer=0,
        undecided=0,
        level=0,
        excused=0,
        allowed=0.06,
    )
    return Verdict(
        versions={"vllm": "0.16.0"},
        device="cpu",
        dtype="torch.bfloat16",
        tensor_parallel_size=2,
        patches=("reply-shape", "workers"),
        workers=2,
        model_runner="vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        layer_ids=(3,),
        samples=2,
        tokens=20,
        largest_batch=20,
        seconds={"loading": 1.23456},
        tokens_per_second=1234.5678,
        report=Report(prompts=2, rows=20, layers=(layer,), problems=problems),
        file_problems=file_problems,
        folder=None,
    )


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(_verdict(), 0), (_verdict("a swapped row"), 1), (_verdict(file_problems=("a swapped row",)), 1)],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_code_and_the_output_follow_the_verdict(
    verdict: Verdict,
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "run", lambda options: verdict)
    assert demo.main(_parsed("--json") if as_json else _parsed()) == code
    out = capsys.readouterr().out
    if as_json:
        answer = json.loads(out)
        assert answer["ok"] is (code == 0)
        assert answer["problems"] == ["a swapped row"] * code
        assert answer["layers"][0]["min_cosine"] == 0.9995
        assert answer["margin"] == 0.7
    else:
        assert "vllm 0.16.0" in out
        assert "2 applied: reply-shape, workers" in out
        assert out.count("problem: a swapped row") == code
        assert out.splitlines()[-1].startswith("FAILED: 1 problem" if code else "OK: ")


def test_json_has_no_nan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of NaN (no finite row) must not make the answer unreadable to strict parsers."""
    verdict = _verdict("nothing but NaN")
    layer = dataclasses.replace(verdict.report.layers[0], max_abs_error=float("nan"))
    report = dataclasses.replace(verdict.report, layers=(layer,))
    monkeypatch.setattr(demo, "run", lambda options: dataclasses.replace(verdict, report=report))
    demo.main(_parsed("--json"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["layers"][0]["max_abs_error"] is None


@pytest.mark.parametrize("as_json", [False, True])
def test_what_stops_the_run_is_the_answer(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(options: demo.Options) -> Verdict:
        raise RuntimeError("worker died")

    monkeypatch.setattr(demo, "run", stop)
    assert demo.main(_parsed("--json") if as_json else _parsed()) == 1
    captured = capsys.readouterr()
    assert "RuntimeError: worker died" in captured.err
    if as_json:
        assert json.loads(captured.out) == {"schema": 1, "ok": False, "error": "RuntimeError: worker died"}
    else:
        assert captured.out == ""


def test_arguments_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[demo.Options] = []

    def note(options: demo.Options) -> Verdict:
        seen.append(options)
        return _verdict()

    monkeypatch.setattr(demo, "run", note)
    demo.main(_parsed())
    demo.main(
        _parsed(
            *("--tensor-parallel-size", "2", "--samples", "3", "--layers", "1", "5", "--seq-length", "256"),
            *("--batch-size", "4", "--output-dir", "here", "--keep", "--verbose"),
        )
    )
    assert seen[0] == demo.Options()
    assert seen[1] == demo.Options(
        tensor_parallel_size=2,
        samples=3,
        layer_ids=(1, 5),
        seq_length=256,
        batch_size=4,
        output_dir=Path("here"),
        keep=True,
        verbose=True,
    )


def _parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(args)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"seq_length": 10}, "seq_length is 10"),
        ({"layer_ids": (0, 8)}, "layer 8"),
        ({"layer_ids": (4, 2)}, "must ascend"),
        ({"layer_ids": (2, 2)}, "must ascend"),
    ],
)
def test_options_that_cannot_work(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(demo.Options(), **change).check()


def test_stdout_is_kept_free_also_for_child_processes(capfd: pytest.CaptureFixture[str]) -> None:
    with demo.stdout_to_stderr():
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    print("the verdict")
    captured = capfd.readouterr()
    assert captured.out == "the verdict\n"
    assert {"from Python", "from C", "from a child"} <= set(captured.err.splitlines())


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked of vLLM's platform; here a stand-in for it."""
    import types

    platforms = types.SimpleNamespace(current_platform=types.SimpleNamespace(device_type="cpu"))
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    names = ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "7"})
    assert demo._prepare(demo.Options()) == "cpu"
    assert [os.environ.get(name) for name in names] == ["1", "1", "7", None]
    assert demo._prepare(demo.Options(tensor_parallel_size=2)) == "cpu"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    platforms.current_platform.device_type = "cuda"
    monkeypatch.setattr(os, "environ", {})
    assert demo._prepare(demo.Options(tensor_parallel_size=2)) == "cuda"
    assert [os.environ.get(name) for name in names] == ["1", "1", None, None]


def test_stages_say_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    stages = Stages(2)
    with stages("making a model"):
        pass
    with pytest.raises(ZeroDivisionError), stages("starting it"):
        raise ZeroDivisionError
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert said.startswith("[1/2] making a model ...\n")
    assert "[2/2] starting it ...\n" in said
    assert list(stages.seconds) == ["making"]
