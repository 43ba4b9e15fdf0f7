"""`vllm-compat plan --model`: verdicts from configurations alone, on a made-up vLLM and on the real set of patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.patches import _models
from vllm_compat.patches.capture import check_whole_streams
from vllm_compat.patches.model_plan import about_model, read_config, text_config
from vllm_compat.questions import Answered
from vllm_compat.registry import Answer, Surroundings

REGISTRY = """
_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "NewForCausalLM": ("vllm.models.new", "NewForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "CohereForCausalLM": ("commandr", "CohereForCausalLM"),
}
_EMBEDDING_MODELS = {
    "BertModel": ("bert", "BertEmbeddingModel"),
    **{k: (mod, arch) for k, (mod, arch) in _TEXT_GENERATION_MODELS.items() if arch == "LlamaForCausalLM"},
    "LlamaModel": ("llama", "LlamaForCausalLM"),
    "ComputedModel": where("computed"),
}
_MULTIMODAL_MODELS = {"SeeForConditionalGeneration": ("see", "See")}
_TRANSFORMERS_SUPPORTED_MODELS = {"SmolLM3ForCausalLM": ("transformers", "TransformersForCausalLM")}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS}
"""
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "torch_dtype": "bfloat16"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "vllm" / "model_executor" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    (folder / "registry.py").write_text(REGISTRY)
    return tmp_path / "site"


@pytest.fixture
def ask(site: Path, tmp_path: Path) -> Any:
    def about(config: dict[str, Any] | None, *, environ: dict[str, str] | None = None, vllm: str = "0.16.0") -> Answer:
        (tmp_path / "config.json").write_text(json.dumps(config))
        here = Surroundings(
            environ=environ or {}, versions={"vllm": vllm}, options={"model": str(tmp_path)}, path=(str(site),)
        )
        return about_model(here)

    return about


@pytest.fixture
def yarn_without_a_factor(site: Path) -> None:
    """So that the magnitudes of YaRN are compared."""
    folder = site / "vllm" / "model_executor" / "layers" / "rotary_embedding"
    folder.mkdir(parents=True)
    (folder / "yarn_scaling_rope.py").write_text("class YaRNScalingRotaryEmbedding:\n    def __init__(self): ...\n")


def test_a_known_model(ask) -> None:
    answer = ask(LLAMA)
    assert answer.facts["verdict"] == "shown"
    assert answer.facts["vllm_class"] == "llama:LlamaForCausalLM"
    assert (answer.facts["layers"], answer.facts["hidden_size"]) == (32, 4096)
    assert answer.facts["default_layer_ids"] == [2, 16, 29, 31]
    (finding,) = answer.findings
    assert finding.status == "ok"
    assert "docs/models.md says with which releases, devices and formats" in finding.text  # only the class is known


def test_a_model_that_nobody_has_run_is_tried(ask) -> None:
    answer = ask(LLAMA | {"architectures": ["NewForCausalLM"]})
    assert answer.facts["verdict"] == "tried"
    assert "refused right after loading" in answer.findings[0].text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["SmolLM3ForCausalLM"]}, "Transformers backend"),
        ({"architectures": ["NobodysForCausalLM"]}, "no class of that name"),
        ({"architectures": ["ComputedModel"]}, "no class of that name"),
        ({"architectures": ["BertModel"]}, "pooling or draft model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "pooling or draft model"),  # vLLM goes by the name
        ({"architectures": ["CohereForCausalLM"]}, "must not be added"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({}, None),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "float16", "routed_scaling_factor": 2.5},
            "use bfloat16",
        ),
    ],
)
def test_refused(ask, changes: dict[str, Any], why: str | None) -> None:
    answer = ask(LLAMA | changes)
    assert (answer.facts["verdict"] == "refused") == (why is not None)
    if why is not None:
        assert answer.findings[0].status == "problem"
        assert why in answer.findings[0].text


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"architectures": []}, "unknown"),  # vLLM may know by the model_type
        ({"architectures": ["NobodysForCausalLM", "LlamaForCausalLM"]}, "shown"),  # vLLM takes the one that it has
        ({"architectures": ["LlamaModel"]}, "tried"),  # a bare model that a generating class runs
        ({"quantization_config": "fp8"}, "shown"),  # speculators or vLLM will say what they make of it
    ],
)
def test_unusual_configurations(ask, changes: dict[str, Any], verdict: str) -> None:
    assert ask(LLAMA | changes).facts["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"architectures": "LlamaForCausalLM"}, "shown"),  # that one class, not its letters
        ({"architectures": [["x"]]}, "unknown"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "unknown"),
        ({"architectures": 3}, "unknown"),
        ({"architectures": [["x"], "LlamaForCausalLM"]}, "shown"),
        ({"quantization_config": [1]}, "shown"),
        ({"quantization_config": {"quant_method": {"x": 1}}}, "shown"),
        ({"rope_scaling": "linear"}, "shown"),
        ({"rope_scaling": [1]}, "shown"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "shown"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "shown"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": [1]}}, "shown"),
        ({"rope_scaling": {"type": "su", "original_max_position_embeddings": [4096]}}, "shown"),
        ({"auto_map": 3}, "shown"),
        ({"auto_map": "x"}, "shown"),
        ({"torch_dtype": {"": "float16"}}, "shown"),
    ],
)
def test_odd_values_are_ignored(ask, yarn_without_a_factor, changes: dict[str, Any], verdict: str) -> None:
    answer = ask(LLAMA | changes, vllm="0.16.0+cpu")
    assert answer.facts["verdict"] == verdict
    assert len(answer.findings) == 1
    facts = answer.facts
    assert (facts["quantization"], facts["remote_code"]) == (None, None)
    assert facts["dtype"] == (None if "torch_dtype" in changes else "bfloat16")
    json.dumps(dict(facts))


@pytest.mark.parametrize("scaling", ["linear", [1]])
def test_odd_scaling_of_latent_attention(ask, scaling: Any) -> None:
    config = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "rope_scaling": scaling}
    assert ask(config, vllm="0.16.0+cpu").facts["verdict"] == "refused"  # no YaRN that is read


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"text_config": ' * 100_000])
def test_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read: "):
        read_config(str(tmp_path), {})


def test_text_models_deep_inside() -> None:
    inside: dict[str, Any] = {"num_hidden_layers": 8}
    for _ in range(2 * sys.getrecursionlimit()):
        inside = {"text_config": inside}
    assert text_config(inside) == {"num_hidden_layers": 8}


@pytest.mark.parametrize("home", ["cache", "~nosuchuser"])
@pytest.mark.parametrize("model", ["~nosuchuser/x", "a" * 300, "some/" + "a" * 300])
def test_names_that_no_folder_has(tmp_path: Path, model: str, home: str) -> None:
    (tmp_path / "cache" / "hub").mkdir(parents=True)
    environ = {"HF_HOME": home.replace("cache", str(tmp_path / "cache"))}
    answer = about_model(Surroundings(environ=environ, versions={"vllm": None}, options={"model": model}, path=()))
    assert answer.facts == {"verdict": "unknown"}
    assert answer.findings[0].status == "problem"
    assert answer.findings[0].text.startswith(model)


def test_positions_that_hugging_face_turns_otherwise(ask) -> None:
    answer = ask(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert answer.facts["verdict"] == "shown"
    assert (answer.findings[-1].status, "rope type dynamic" in answer.findings[-1].text) == ("warning", True)


def test_a_scale_of_one_changes_nothing(ask) -> None:
    config = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "float16"}
    assert ask(config | {"routed_scaling_factor": 1.0}).facts["verdict"] != "refused"


def test_a_wrapper(ask) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "kv_lora_rank": 512, "dtype": "bfloat16"}
    config = {"architectures": ["SeeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    answer = ask(config, vllm="0.16.0+cpu")
    assert (answer.facts["layers"], answer.facts["hidden_size"], answer.facts["dtype"]) == (61, 7168, "bfloat16")
    assert any("text prompts only" in finding.text for finding in answer.findings)


def test_latent_attention_with_yarn_runs_on_the_cpu_build(ask) -> None:
    config = LLAMA | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "rope_scaling": {"type": "yarn", "factor": 40},
    }
    answer = ask(config, vllm="0.16.0+cpu")
    assert answer.facts["verdict"] == "shown"
    assert "VLLM_MLA_DISABLE=1" in answer.findings[-1].text
    assert "VLLM_MLA_DISABLE" not in str(ask(config, vllm="0.16.0").findings)


@pytest.mark.parametrize(("vllm", "refused"), [("0.16.0+cpu", True), ("0.16.0", False)])
def test_latent_attention_on_the_cpu_build(ask, vllm: str, refused: bool) -> None:
    answer = ask(LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, vllm=vllm)
    assert (answer.facts["verdict"] == "refused") == refused
    assert ("use a GPU" in answer.findings[0].text) == refused


def test_what_speculators_itself_wants(ask) -> None:
    inside = {"architectures": ["LlamaForCausalLM"], "llm_config": {"num_hidden_layers": 8}}
    assert any("top and in text_config" in finding.text for finding in ask(inside).findings)


@pytest.mark.parametrize(
    ("layers", "fit"), [(-1, False), (2, False), (4, False), (5, False), (6, False), (7, True), (10**18, True)]
)
def test_default_layer_ids_of_short_models(ask, layers: int, fit: bool) -> None:
    findings = ask(LLAMA | {"num_hidden_layers": layers}).findings
    assert [f.status for f in findings if "give --layer-ids" in f.text] == ([] if fit else ["warning"])


def test_no_vllm_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    here = Surroundings(environ={}, versions={"vllm": None}, options={"model": str(tmp_path)}, path=(str(tmp_path),))
    assert about_model(here).facts["verdict"] == "unknown"


def test_an_id_is_looked_up_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--some--model"
    for revision in ("old", "new"):
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps({"revision": revision}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old")
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        assert read_config("some/model", environ)[1] == {"revision": "old"}
    with pytest.raises(ValueError, match="neither a folder nor in Hugging Face's cache"):
        read_config("some/other", {"HF_HOME": str(tmp_path)})


def test_folders_without_a_configuration(tmp_path: Path, ask) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_config(str(tmp_path / "site"), {})
    answer = ask(None)
    assert answer.facts["verdict"] == "unknown"
    assert "no JSON object" in answer.findings[0].text


def test_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(str(tmp_path / "config.json"), {}) == read_config(str(tmp_path), {})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_model(ask, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    answer = ask(LLAMA)
    assert answer.facts["verdict"] == "shown"
    assert (answer.findings[-1].status, answer.findings[-1].text.split()[0]) == ("warning", name)


def test_text_that_no_terminal_shows(ask) -> None:
    answer = ask(LLAMA | {"architectures": ["\ud800"]})
    answered = Answered(patch_set="speculators", question="model", given="\udcff", answer=answer)
    assert "\\ud800 is refused" in answered.as_text().encode().decode()


def test_no_name_is_not_the_current_folder(tmp_path: Path) -> None:
    """An unset variable: neither left unanswered nor taken for a path."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = "import sys, vllm_compat.cli as cli; sys.exit(cli.main(['plan', '--json', '--model', '']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["facts"] == {"verdict": "unknown"}
    assert "no model is named" in answer["findings"][0]["text"]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command(tmp_path: Path, site: Path, as_json: bool) -> None:
    """In a process of its own: nothing heavy is imported, and the exit code follows the answer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["CohereForCausalLM"]}))
    arguments = ["plan", "--target", str(site), "--model", str(tmp_path), *(["--json"] if as_json else [])]
    code = (
        f"import sys, vllm_compat.cli as cli\ncode = cli.main({arguments!r})\n"
        "assert not {'torch', 'vllm', 'transformers', 'speculators'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 1, done.stderr
    if as_json:
        (answer,) = json.loads(done.stdout)["answers"]
        assert (answer["set"], answer["question"], answer["ok"]) == ("speculators", "model", False)
        assert answer["facts"]["verdict"] == "refused"
        assert answer["findings"][0]["status"] == "problem"
    else:
        assert "problem: CohereForCausalLM is refused: its decoder layers return" in done.stdout


def test_nothing_is_both_shown_and_refused() -> None:
    assert not _models.SHOWN & _models.REFUSED.keys()


@pytest.mark.parametrize("other", [[0.3, 0.1, 7.0], [-1.0, 2.0, 3.0]])
def test_ranks_that_hold_parts_of_a_sum_are_refused(other: list[float]) -> None:
    with pytest.raises(Exception, match="rank 1 holds another residual stream than rank 0"):
        check_whole_streams([[1.0, 2.0, 3.0], other])


def test_ranks_with_one_stream_are_fine() -> None:
    check_whole_streams([[1.0, 2.0, 3.0]])
    check_whole_streams([[1.0, 2.0, 3.0], [1.001, 2.0, 3.0]])
    check_whole_streams([[1.0, float("nan")], [1.0, float("inf")]])
    check_whole_streams([[], []])  # the model has not run yet
    check_whole_streams([[1.0], []])


@pytest.mark.parametrize(
    ("architecture", "text", "on_cpu", "why"),
    [
        ("LlamaForCausalLM", {}, True, None),
        ("Exaone4ForCausalLM", {}, False, "must not be added"),
        ("Dots1ForCausalLM", {"routed_scaling_factor": 2.5}, False, "shared experts"),
        ("Dots1ForCausalLM", {"routed_scaling_factor": 1.0}, False, None),
        ("GptOssForCausalLM", {"sliding_window": 128, "layer_types": [FULL, SLIDING]}, False, "every other layer"),
        ("GptOssForCausalLM", {"sliding_window": 128, "layer_types": [SLIDING] * 2}, False, "every other layer"),
        ("GptOssForCausalLM", {"sliding_window": 128, "layer_types": [SLIDING, FULL] * 2}, False, None),
        ("GptOssForCausalLM", {"sliding_window": 128}, False, None),
        ("GptOssForCausalLM", {"sliding_window": None, "layer_types": [FULL] * 2}, False, None),
        ("Ernie4_5_MoeForCausalLM", {}, True, "e_score_correction_bias"),
        ("Ernie4_5_MoeForCausalLM", {}, False, None),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, True, "YaRN"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, False, None),
    ],
)
def test_refused_by_class_and_configuration(
    architecture: str, text: dict[str, Any], on_cpu: bool, why: str | None
) -> None:
    reason = _models.refusal(architecture, text, dtype="bfloat16", on_cpu=on_cpu)
    assert reason is None if why is None else reason is not None and why in reason
