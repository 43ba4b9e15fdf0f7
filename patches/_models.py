"""What is known of model classes: data, for the refusal before loading and for ``vllm-compat plan --model``.

``SHOWN`` is what the live table shows (docs/models.md; a test holds the two together). Classes in none of the lists are
tried: after loading, the model's own final norm decides (``worker/meaning.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
    }
)

TRANSFORMERS_BACKEND = (
    "vLLM has no class of its own for it and runs transformers' code (its Transformers backend), whose layers return "
    "[batch, tokens, hidden]; use a vLLM that has the model, or extract with Hugging Face"
)
NOT_IN_VLLM = (
    "this release of vLLM has no class of that name (where transformers has one, vLLM would run transformers' code, "
    "which is refused, too); use a vLLM that has the model, or extract with Hugging Face"
)
ENCODER_DECODER = "it is an encoder-decoder; an EAGLE-3 draft model learns from a decoder alone"
LATENT_ON_CPU = (
    "the rotary kernel of vLLM's CPU build turns the queries of its latent attention (MLA) wrongly where there is no "
    "YaRN, so nearly every row would be wrong; use a GPU"
)
# 0.11.0 does not yet, 0.16.0 does; refused in all of them until somebody needs the model.
DOTS1 = "vLLM scales its shared experts by routed_scaling_factor, too (dots1.py), which the model itself does not"
BIAS_ON_CPU = (
    "vLLM's CPU build picks its experts without e_score_correction_bias (cpu_fused_moe.py, cpu_router.py); use a GPU"
)
# Those whose bias stands beside a plain softmax over all experts; in groups of experts the CPU build does read it.
BIAS_OF_EXPERTS = frozenset({"Ernie4_5_MoeForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration"})
# gpt_oss.py, 0.11.0 to 0.33; as published every other layer slides, the first one too.
EVERY_OTHER_SLIDES = "its layer_types are not what vLLM runs: there every other layer slides, from the first one on"
PIPELINE = "pipeline parallelism splits the layers; expected pipeline_parallel_size=1"
SEQUENCE = "sequence-parallel experts split the rows between ranks; turn expert parallelism off"
FLOAT16 = "in float16 its layers scale the residual stream down; use bfloat16"

# vllm/model_executor/models/deepseek_v2.py and openpangu.py (0.16.0): the stream is divided by routed_scaling_factor.
SCALED_IN_FLOAT16 = frozenset(
    {
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
        "PanguUltraMoEForCausalLM",
    }
)

_LEFTOVER = (
    "its decoder layers return hidden states and a residual that is in them already, which must not be added ({})"
)
_WITH_CACHE = "its decoder layers return keys and values beside hidden states and residual (hunyuan_v1.py)"
REFUSED = {
    "CohereForCausalLM": _LEFTOVER.format("commandr.py"),
    "Cohere2ForCausalLM": _LEFTOVER.format("commandr.py"),
    "Exaone4ForCausalLM": _LEFTOVER.format("exaone4.py"),
    "GraniteMoeHybridForCausalLM": _LEFTOVER.format("granitemoehybrid.py"),
    "HunYuanDenseV1ForCausalLM": _WITH_CACHE,
    "HunYuanMoEV1ForCausalLM": _WITH_CACHE,
    "NemotronForCausalLM": "its final norm (nemotron.py) is not one that is known to add hidden states and residual",
    "PhiMoEForCausalLM": _LEFTOVER.format("phimoe.py"),
    "StableLMEpochForCausalLM": _LEFTOVER.format("stablelm.py"),
    "StableLmForCausalLM": _LEFTOVER.format("stablelm.py"),
    "Gemma3nForCausalLM": "its layers carry several streams at once (AltUp), so there is no one row per token",
    "Gemma3nForConditionalGeneration": "its layers carry several streams at once (AltUp): no one row per token",
}
"""Architecture to reason: refused on every release before loading."""


def refusal(architecture: str, text: Mapping[str, Any], *, dtype: str | None, on_cpu: bool) -> str | None:
    """Why no rows of this model would be right, from its class, its text model's configuration and its dtype
    ("float16")."""
    if known := REFUSED.get(architecture):
        return known
    scaled = text.get("routed_scaling_factor") not in (None, 1)
    if scaled and architecture == "Dots1ForCausalLM":
        return DOTS1
    if scaled and dtype == "float16" and architecture in SCALED_IN_FLOAT16:
        return FLOAT16
    if architecture == "GptOssForCausalLM" and text.get("sliding_window") and not _every_other_slides(text):
        return EVERY_OTHER_SLIDES
    if on_cpu and architecture in BIAS_OF_EXPERTS:
        return BIAS_ON_CPU
    if on_cpu and turned_by_the_kernel(text):
        return LATENT_ON_CPU
    return None


def _every_other_slides(text: Mapping[str, Any]) -> bool:
    kinds = text.get("layer_types")  # without any, transformers takes every other layer, too
    if not isinstance(kinds, list):
        return True
    return all(kind == ("full_attention" if number % 2 else "sliding_attention") for number, kind in enumerate(kinds))


def turned_by_the_kernel(text: Mapping[str, Any]) -> bool:
    """Whether a text configuration is one of latent attention whose queries ``worker/rotary.py`` is about.

    That finds any other model, too, after loading.
    """
    return bool(text.get("kv_lora_rank")) and rope_type(rope_of(text)) in (None, "default")


def rope_of(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a text configuration says of its rotary embedding, under the name of transformers 5 or 4."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return rope if isinstance(rope, Mapping) else {}


def rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))
