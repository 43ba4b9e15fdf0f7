"""The tiny model, its tokenizer and conversations; the reference; and faults planted in real states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_compat.extraction import tiny
from vllm_compat.extraction.compare import compare
from vllm_compat.extraction.reference import reference_states

LAYERS = 8
LAYER_IDS = (2, 4, 5, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, layers=LAYERS, dtype="bfloat16")
    return tiny.make_tokenizer(folder)


@pytest.fixture(scope="module")
def prompts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    path = tiny.make_conversations(tmp_path_factory.mktemp("data") / "c.jsonl", 8, words=(30, 120))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    conversations = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns], tokenize=False
        )
        for turns in conversations
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def want(model: Path, prompts: list[list[int]]) -> list[list[Any]]:
    return reference_states(model, prompts, LAYER_IDS, dtype=torch.bfloat16)


@pytest.fixture
def got(model: Path, prompts: list[list[int]]) -> list[list[Any]]:
    """The same states, computed with other roundings: in float32, rounded once."""
    states = reference_states(model, prompts, LAYER_IDS, dtype=torch.float32)
    return [[layer.bfloat16() for layer in layers] for layers in states]


def test_the_model_is_the_same_every_time(model: Path, tmp_path: Path) -> None:
    again = tiny.make_model(tmp_path / "again", layers=LAYERS, dtype="bfloat16")
    other = tiny.make_model(tmp_path / "other", layers=LAYERS, dtype="bfloat16", seed=1)
    weights = (model / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_the_model_says_what_it_is(model: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(model)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (LAYERS, 64, 32)
    assert "bfloat16" in (model / "config.json").read_text()


def test_qwen3_can_be_built_too(tmp_path: Path, prompts: list[list[int]]) -> None:
    tiny.make_model(tmp_path, layers=3, architecture="qwen3")
    states = reference_states(tmp_path, prompts[:1], [0, 2], dtype=torch.float32)
    assert [tuple(layer.shape) for layer in states[0]] == [(len(prompts[0]), 64)] * 2


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mamba"):
        tiny.make_model(tmp_path, architecture="mamba")
    with pytest.raises(ValueError, match="multiple"):
        tiny.make_model(tmp_path, heads=4, kv_heads=3)


def test_the_tokenizer_reads_back_what_it_wrote(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert tokenizer.is_fast
    assert len(tokenizer) <= tiny.VOCABULARY
    text = "The heron, 42 apples and an ümläut: 河 🦊"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.convert_tokens_to_ids(token) for token in tiny.SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.eos_token == tiny.IM_END
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"
    ids = tokenizer(chat)["input_ids"]
    assert ids.count(1) == 1
    assert ids.count(2) == 1


def test_conversations(tmp_path: Path) -> None:
    path = tiny.make_conversations(tmp_path / "c.jsonl", 9)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 9
    assert len({row["id"] for row in rows}) == 9
    for number, row in enumerate(rows):
        speakers = [turn["from"] for turn in row["conversations"]]
        assert speakers[-1] == "gpt"
        assert (speakers[0] == "system") == (number % 4 == 3)
    assert path.read_text() == tiny.make_conversations(tmp_path / "again.jsonl", 9).read_text()
    assert path.read_text() != tiny.make_conversations(tmp_path / "other.jsonl", 9, seed=1).read_text()


def test_prompts_differ_early(prompts: list[list[int]]) -> None:
    """Except for those with the same system message: they share more than 64 tokens, so cache blocks."""
    shared = [prompt for number, prompt in enumerate(prompts) if number % 4 == 3]
    others = [prompt for number, prompt in enumerate(prompts) if number % 4 != 3]
    assert len({tuple(prompt[:16]) for prompt in others}) == len(others)
    assert len({tuple(prompt[:64]) for prompt in shared}) == 1
    assert len({tuple(prompt[:128]) for prompt in shared}) == len(shared)


def test_the_consumer_accepts_tokenizer_and_conversations(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own preprocessing finds the assistant's turns, and the token counts are those of its own."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from speculators.data_generation import preprocessing

    data = tiny.make_conversations(tmp_path / "c.jsonl", 6)
    dataset, _ = preprocessing.load_and_preprocess_dataset(
        target_model_path=str(model),
        train_data_path=str(data),
        seq_length=400,
        build_dataset_num_proc=1,
        token_freq_path=str(tmp_path / "token_freq.pt"),
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(dataset) == 6
    for row in dataset:
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 400
        assert 0 < int(row["loss_mask"].sum()) < len(row["loss_mask"])


def test_the_reference_is_the_layers_output_before_the_final_norm(model: Path, prompts: list[list[int]]) -> None:
    """Held against `output_hidden_states`, whose last entry alone is normed."""
    every = list(range(LAYERS))
    states = reference_states(model, prompts[:2], every, dtype=torch.float32)
    network = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    for prompt, layers in zip(prompts, states, strict=False):
        with torch.inference_mode():
            hidden = network(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
            for layer_id in every[:-1]:
                torch.testing.assert_close(layers[layer_id], hidden[layer_id + 1][0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(network.model.norm(layers[-1]), hidden[-1][0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(layers[-1], hidden[-1][0], rtol=0.5)


def test_the_reference_has_the_dtype_asked_for_and_the_order_of_the_ids(
    model: Path, prompts: list[list[int]], want: list[list[Any]]
) -> None:
    assert {layer.dtype for layers in want for layer in layers} == {torch.bfloat16}
    turned = reference_states(model, prompts[:1], LAYER_IDS[::-1], dtype=torch.bfloat16)
    for layer, expected in zip(turned[0][::-1], want[0], strict=True):
        assert torch.equal(layer, expected)


def test_the_reference_refuses_what_it_cannot_answer(model: Path) -> None:
    with pytest.raises(ValueError, match="layer 8 is not one of the model's layers 0 to 7"):
        reference_states(model, [[1, 2]], [8], dtype=torch.float32)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        reference_states(model, [[1, 2], []], [0], dtype=torch.float32)


def test_rows_and_layers_of_the_model_differ_clearly_in_bfloat16(
    got: list[list[Any]], want: list[list[Any]], prompts: list[list[int]]
) -> None:
    report = compare(got, want, layer_ids=LAYER_IDS, prompts=prompts)
    assert report.ok, report.problems
    assert report.margin > 0.4
    assert all(layer.undecided == 0 for layer in report.layers)
    assert all(layer.max_relative_error < layer.tolerance / 1.5 for layer in report.layers)


@pytest.mark.parametrize("fault", ["neighbours", "prompts", "shift", "layer", "norm", "nan", "missing", "same token"])
def test_faults_in_real_states_are_found(
    fault: str, model: Path, got: list[list[Any]], want: list[list[Any]], prompts: list[list[int]]
) -> None:
    if fault == "neighbours":
        for layer in got[1]:
            layer[[20, 21]] = layer[[21, 20]]
    elif fault == "prompts":
        for a, b in zip(got[0], got[2], strict=True):
            a[30], b[30] = b[30].clone(), a[30].clone()
    elif fault == "shift":
        got[5] = [layer.roll(1, dims=0) for layer in got[5]]
    elif fault == "layer":
        states = reference_states(model, prompts, [3], dtype=torch.bfloat16)
        got = [[layers[0], other[0], *layers[2:]] for layers, other in zip(got, states, strict=True)]
    elif fault == "norm":
        network = transformers.AutoModelForCausalLM.from_pretrained(model).float()
        with torch.inference_mode():
            got = [[*layers[:-1], network.model.norm(layers[-1].float()).bfloat16()] for layers in got]
    elif fault == "nan":
        got[7][3][0, 0] = float("nan")
    elif fault == "missing":
        got[6] = [layer[1:] for layer in got[6]]
    else:  # the hardest swap: two rows of one token in one prompt, far behind its beginning
        prompt = prompts[0]
        here = len(prompt) - 4
        there = max(row for row in range(here) if prompt[row] == prompt[here])
        for layer in got[0]:
            layer[[here, there]] = layer[[there, here]]
    report = compare(got, want, layer_ids=LAYER_IDS, prompts=prompts)
    assert not report.ok
    if fault in ("neighbours", "prompts", "same token"):
        assert [layer.misplaced for layer in report.layers] == [2] * 4
    elif fault == "layer":
        assert report.layers[1].outside > 0.99 * report.rows
