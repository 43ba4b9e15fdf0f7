"""From a family's configuration to a checkpoint folder with random weights, and one that Hugging Face can read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import quantized
from zoo.families import SHAPE, VOCABULARY, Family

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Checkpoint:
    folder: Path  # what vLLM is given
    reference: Path  # the same weights, as transformers' own classes read them
    adapt: Callable[[Any], None] = lambda model: None  # what the checkpoint's format does to activations
    words: str = "Hugging Face, float32"
    rounding: float = 0.0  # what a layer's activations may lose beside 16-bit roundings, of a row's length

    @property
    def architecture(self) -> str:
        return str(json.loads((self.folder / "config.json").read_text())["architectures"][0])

    def load(self) -> Any:
        """The reference, in float32."""
        import torch

        from vllm_compat.extraction.reference import Reference

        reference = Reference(self.reference, dtype=torch.float32, trust_remote_code=True)
        self.adapt(reference._model)
        return reference


def build(family: Family, folder: Path) -> Checkpoint:
    """Write the family's checkpoint into `folder` (new); the same family gives the same weights."""
    import torch
    import transformers

    from vllm_compat.extraction.tiny import make_tokenizer

    config_class = getattr(transformers, family.config)
    if family.text is None:
        config = config_class(**SHAPE | dict(family.values))
    else:
        ids = dict(zip(MARK_IDS, range(VOCABULARY, VOCABULARY + len(MARK_IDS)), strict=True))
        config = config_class(text_config={**family.text, "vocab_size": VOCABULARY + 8}, **family.values, **ids)
    reference = folder / "model"
    # In float32 first: some classes draw buffers while they are made.
    model = _class_of(config)(config)
    fill(model, torch.Generator().manual_seed(0))
    model.to(getattr(torch, family.dtype)).save_pretrained(reference, safe_serialization=True)
    make_tokenizer(reference)
    if family.text is not None:
        # transformers 4.57 writes it into the text model's part only.
        _edit(reference / "config.json", lambda config: config.update(architectures=[type(model).__name__]))
        _write_processor(reference)
    if family.quantize is not None:
        return quantized.write(family.quantize, reference, folder)
    if family.wrapper is None:
        return Checkpoint(reference, reference)
    wrapped = folder / "wrapped"
    shutil.copytree(reference, wrapped)
    WRAPPERS[family.wrapper](wrapped)
    return Checkpoint(wrapped, reference)


def _class_of(config: Any) -> Any:
    import transformers

    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"transformers has no generating model for {type(config).__name__}")


def fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """The tiny model's way of filling (vllm_compat.extraction.tiny), for names and shapes that it does not know.

    Norms that compute with ``1 + weight`` (Gemma, Qwen3-Next) get weights around 0, told by what they were born with.
    """
    import torch

    from vllm_compat.extraction.tiny import _fill

    born = {name: float(weight.detach().float().mean()) for name, weight in model.named_parameters()}
    _fill(model, generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and born[name] == 0 and not name.endswith("bias"):
                weight.sub_(1)
            elif name.endswith(("gate_up_proj", "down_proj")) and weight.dim() == 3:
                weight.mul_((weight.shape[-1] / weight.shape[-2]) ** 0.5)  # these are stored [experts, in, out]
            elif name.endswith(("gate_up_proj_bias", "down_proj_bias")):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
            elif name.endswith(("sinks", "A_log", "dt_bias")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=2))


def remote_code(folder: Path) -> None:
    """Configuration and tokenizer as code in the folder, under names that nobody else knows."""
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
    )
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    _edit(
        folder / "config.json",
        lambda config: config.update(model_type="own_llama", auto_map={"AutoConfig": "configuration_own.OwnConfig"}),
    )
    _edit(
        folder / "tokenizer_config.json",
        lambda config: config.update(
            tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        ),
    )


def kimi_k2(folder: Path) -> None:
    """As moonshotai publishes it: DeepSeek-V3's architecture under its own model type, the configuration as code."""
    (folder / "configuration_kimi.py").write_text(
        "from transformers import DeepseekV3Config\n\n\nclass KimiK2Config(DeepseekV3Config):\n"
        "    model_type = 'kimi_k2'\n"
    )
    _edit(
        folder / "config.json",
        lambda config: config.update(model_type="kimi_k2", auto_map={"AutoConfig": "configuration_kimi.KimiK2Config"}),
    )


KIMI_K25_CODE = '''
import torch
from transformers import DeepseekV3Config, PretrainedConfig
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = vision_config
        super().__init__(**kwargs)


class KimiK25Images(BaseImageProcessor):
    """What vLLM asks of it at start-up, for its own dummy; no image is ever given."""

    num_frames_per_chunk = 4

    def media_tokens_calculator(self, media):
        return 64

    def preprocess(self, media, **kwargs):
        """16 x 16 patches of each, which the tower merges by fours."""
        return {
            "pixel_values": torch.zeros(256 * len(media), 3, 14, 14),
            "grid_thws": torch.tensor([[1, 16, 16]] * len(media)),
        }
'''


KIMI_K25_IMAGES = {  # for the image processor that later releases of vLLM have themselves
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "in_patch_limit": 256,
    "in_patch_limit_each_frame": None,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 16,
    "fixed_output_tokens": None,
}


def kimi_k25(folder: Path) -> None:
    """The wrapper: a vision tower with random weights beside the text model, whose names get a prefix."""
    import safetensors.torch

    text = json.loads((folder / "config.json").read_text())
    vision = {
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": text["hidden_size"],
    }
    (folder / "configuration_kimi_k25.py").write_text(KIMI_K25_CODE.lstrip())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": VOCABULARY,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _mark(folder, ("<|media_pad|>",))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "auto_map": {"AutoImageProcessor": "configuration_kimi_k25.KimiK25Images"},
                "media_proc_cfg": KIMI_K25_IMAGES,
            }
        )
    )
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights = {f"language_model.{name}": weight for name, weight in weights.items()}
    weights |= _kimi_k25_tower(text["hidden_size"])
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _kimi_k25_tower(text: int, width: int = 64) -> dict[str, torch.Tensor]:
    """One block of MoonViT and the projector, under the names of the published checkpoint; text: its hidden size."""
    import torch

    block, merged = "vision_tower.encoder.blocks.0.", 4 * width
    linears = {
        block + "wqkv": (3 * width, width),
        block + "wo": (width, width),
        block + "mlp.fc0": (width, width),
        block + "mlp.fc1": (width, width),
        "vision_tower.patch_embed.proj": (width, 3, 14, 14),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (text, merged),
    }
    norms = (block + "norm0", block + "norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm")
    shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.{part}": (width,) for name in norms for part in ("weight", "bias")}
    shapes["vision_tower.patch_embed.pos_emb.weight"] = (4, 4, width)
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def minimax(folder: Path) -> None:
    """Without what transformers computes and saves, and the published checkpoints do not have."""
    import safetensors.torch

    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    computed = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    kept = {name: weight for name, weight in weights.items() if not name.endswith(computed)}
    safetensors.torch.save_file(kept, file, metadata={"format": "pt"})


WRAPPERS: dict[str, Callable[[Path], None]] = {
    "remote_code": remote_code,
    "kimi_k2": kimi_k2,
    "kimi_k25": kimi_k25,
    "minimax": minimax,
}


MARK_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def _mark(folder: Path, marks: tuple[str, ...]) -> None:
    """Give the tokenizer the marks that stand for images, behind the vocabulary of text."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    fillers = [f"<|unused_{number}|>" for number in range(len(tokenizer), VOCABULARY)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fillers, *marks]})
    tokenizer.save_pretrained(folder)


def _write_processor(folder: Path) -> None:
    """vLLM asks a multimodal model for its processor at start-up, although no image comes."""
    import transformers

    _mark(folder, MARKS)
    transformers.Qwen2VLImageProcessor().save_pretrained(folder)
    _edit(folder / "tokenizer_config.json", lambda config: config.update(tokenizer_class="Qwen2TokenizerFast"))
