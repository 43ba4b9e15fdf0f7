"""The model families of the table, as data: one tiny configuration each, random weights, no downloads.

Every family keeps what is its own: windows shorter than the prompts, both kinds of layers, dense layers before sparse
ones, scalings other than 1. Sizes are the smallest that vLLM's kernels take (heads of 32, on the CPU as on a GPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table."""

    name: str  # "Qwen3-MoE"; also the record's file name
    config: str  # transformers' configuration class
    values: Mapping[str, Any] = field(default_factory=dict)  # on top of SHAPE
    text: Mapping[str, Any] | None = None  # the text model's configuration inside a wrapper
    wrapper: str | None = None  # see build.py: how a checkpoint that transformers cannot write is made
    quantize: str | None = None  # see quantized.py
    dtype: str = "bfloat16"
    environ: Mapping[str, str] = field(default_factory=dict)  # settings of this run
    environ_on_cpu: Mapping[str, str] = field(default_factory=dict)  # more of them
    note: str = ""  # what of the family the configuration shows
    refused: str | None = None  # the refusal that is right here (a regular expression)
    refused_on_cpu: str | None = None  # the same, of vLLM's CPU build only
    cannot_on_cpu: str | None = None  # vLLM's own error there (a regular expression), which is not about extraction
    cannot_on_cuda: str | None = None  # the same on an NVIDIA GPU


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
WINDOW = {"sliding_window": 24}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,  # transformers takes it for the rotary part
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = MLA | {
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",  # these two are in the published configurations, and vLLM asks for them
    "topk_method": "noaux_tc",
}
# The widths of the published models, the only ones that the kernels of latent attention know.
LATENT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
}
KIMI_K2 = DEEPSEEK_V3 | LATENT | {"n_group": 1, "topk_group": 1, "rope_scaling": LATENT_YARN}
NO_MLA = {"VLLM_MLA_DISABLE": "1"}  # attention as one writes it down, for any width; the layers are the same
WRONG_ROTARY = "rotary kernel of vLLM's CPU build turns the queries"
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
MROPE = {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]}

YARN = {  # its own factor of 32 makes scores so wide that rounding noise grows from layer to layer
    "rope_type": "yarn",
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 512,
}

FAMILIES = (
    Family(name="Llama", config="LlamaConfig"),
    Family(name="Llama-remote-code", config="LlamaConfig", wrapper="remote_code", note="configuration and tokenizer"),
    Family(name="Mistral", config="MistralConfig", values=WINDOW, note="sliding window"),
    Family(name="Mixtral", config="MixtralConfig", values={"num_local_experts": 8, "num_experts_per_tok": 2}),
    Family(name="Qwen2", config="Qwen2Config"),
    Family(name="Qwen3", config="Qwen3Config"),
    Family(name="Qwen3-MoE", config="Qwen3MoeConfig", values=EXPERTS),
    Family(
        name="Qwen3-Next",
        config="Qwen3NextConfig",
        values=EXPERTS
        | {
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,  # as published; kernels know few others
            "linear_value_head_dim": 128,
        },
        cannot_on_cpu="too many values to unpack",
        note="linear and full attention",
    ),
    Family(
        name="gpt-oss",
        config="GptOssConfig",
        values=WINDOW
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "rope_scaling": YARN},
        note="sliding and full attention, sinks",
    ),
    Family(
        name="DeepSeek-V2",
        config="DeepseekV2Config",
        values=MLA | {"routed_scaling_factor": 1.5, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        environ=NO_MLA,
        refused_on_cpu=WRONG_ROTARY,
        note="dense and sparse layers",
    ),
    Family(
        name="DeepSeek-V3",
        config="DeepseekV3Config",
        values=DEEPSEEK_V3,
        environ=NO_MLA,
        refused_on_cpu=WRONG_ROTARY,
        note="grouped experts",
    ),
    Family(
        name="DeepSeek-V3-float16",
        config="DeepseekV3Config",
        values=DEEPSEEK_V3,
        environ=NO_MLA,
        refused_on_cpu=WRONG_ROTARY,
        dtype="float16",
        refused="in float16 its layers scale the residual stream down",
        note="vLLM divides the stream by the routing factor",
    ),
    Family(
        name="DeepSeek-V3-MLA",
        config="DeepseekV3Config",
        values=DEEPSEEK_V3 | LATENT,
        refused_on_cpu=WRONG_ROTARY,
        note="latent attention's own kernels",
    ),
    Family(
        name="Kimi-K2",
        config="DeepseekV3Config",
        values=KIMI_K2,
        wrapper="kimi_k2",
        environ_on_cpu=NO_MLA,
        note="DeepSeek-V3's classes under its own model type; YaRN",
    ),
    Family(
        name="Kimi-K2.5",
        config="DeepseekV3Config",
        values=KIMI_K2 | {"vocab_size": VOCABULARY + 8},  # the mark for images comes after the text's tokens
        wrapper="kimi_k25",
        environ_on_cpu=NO_MLA,
        note="text prompts; no EAGLE-3 marker in vLLM 0.16; YaRN",
    ),
    Family(
        name="Llama-4-text",
        config="Llama4TextConfig",
        values={
            "intermediate_size_mlp": 128,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 1, 0],
        },
        cannot_on_cpu="apply_router_weight_on_input|attn_chunk_size 64 is not divisible by block_size",
        note="chunked attention, a layer without positions, experts",
    ),
    Family(
        name="Llama-4-text-dense",
        config="Llama4TextConfig",
        values={
            "intermediate_size_mlp": 128,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 1, 0],
        },
        note="the same without experts",
    ),
    Family(
        name="Gemma-2",
        config="Gemma2Config",
        values=WINDOW | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        cannot_on_cuda="build does not support tanh softcapping",  # Hopper's kernels (vllm#25502)
        note="scaled embedding, capped scores, sliding and full attention",
    ),
    Family(
        name="Gemma-3",
        config="Gemma3TextConfig",
        values=WINDOW | {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
        note="scaled embedding, two rotary bases; no EAGLE-3 marker",
    ),
    Family(
        name="Gemma-3n",
        config="Gemma3nTextConfig",
        values=WINDOW
        | {
            "intermediate_size": 128,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * LAYERS,
        },
        refused="several streams at once",
        note="four streams at once",
    ),
    Family(
        name="Granite",
        config="GraniteConfig",
        values={"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        note="multipliers on embedding and residual",
    ),
    Family(name="Phi-3", config="Phi3Config", values=WINDOW, note="sliding window"),
    Family(name="OLMo-2", config="Olmo2Config", note="norms after attention and MLP"),
    Family(name="GLM-4", config="Glm4Config", values={"partial_rotary_factor": 0.5}, note="no EAGLE-3 marker"),
    Family(
        name="GLM-4-MoE",
        config="Glm4MoeConfig",
        values={
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        note="no EAGLE-3 marker",
    ),
    Family(
        name="MiniMax-Text-01",
        config="MiniMaxConfig",
        values={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "block_size": 32,
            "head_dim": 64,  # the narrowest that lightning attention takes
            "rotary_dim": 64,
            "postnorm": True,  # as published, and as transformers takes for granted; vLLM does not
        },
        wrapper="minimax",
        cannot_on_cpu="Found no NVIDIA driver",  # lightning attention is a Triton kernel
        note="lightning and full attention",
    ),
    Family(
        name="MiniMax-M2",
        config="MiniMaxM2Config",
        values={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        cannot_on_cpu='scoring_func == "softmax"',
        note="one norm over all heads of the queries; transformers has it from 5 on",
    ),
    Family(
        name="Qwen2.5-VL",
        config="Qwen2_5_VLConfig",
        text=SHAPE | {"rope_scaling": MROPE},
        values={"vision_config": VISION | {"fullatt_block_indexes": [1]}},
        note="text prompts",
    ),
    Family(
        name="Qwen3-VL",
        config="Qwen3VLConfig",
        text=SHAPE | {"rope_scaling": MROPE | {"mrope_interleaved": True}},
        values={"vision_config": VISION | {"deepstack_visual_indexes": [0, 1]}},
        note="text prompts; deepstack in the model's own forward",
    ),
    Family(
        name="Llama-W8A8",
        config="LlamaConfig",
        quantize="compressed-tensors W8A8 int8",
        cannot_on_cpu="create_onednn_scaled_mm_handler",
        note="per token, dynamic",
    ),
    Family(
        name="Llama-W4A16",
        config="LlamaConfig",
        quantize="compressed-tensors W4A16",
        cannot_on_cpu="has no attribute 'qweight'",
        note="groups of 32",
    ),
    Family(
        name="Llama-AWQ",
        config="LlamaConfig",
        quantize="AWQ",
        cannot_on_cpu="cpu_gemm_wna16",
        note="4 bits, zero points, groups of 32",
    ),
    Family(
        name="Llama-FP8",
        config="LlamaConfig",
        quantize="compressed-tensors FP8",
        cannot_on_cpu="Found no NVIDIA driver",
        note="per token, dynamic",
    ),
    Family(
        name="Gemma-3-full",
        config="Gemma3TextConfig",
        values=WINDOW | {"query_pre_attn_scalar": 32, "layer_types": ["full_attention"] * LAYERS},
        note="a window in the configuration, and no layer that slides",
    ),
    Family(
        name="GPT-NeoX",
        config="GPTNeoXConfig",
        values={"rotary_pct": 0.5},
        note="its layers in another place, LayerNorm; no EAGLE-3 marker",
    ),
    Family(
        name="dots.llm1",
        config="Dots1Config",
        values={
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        refused="scales its shared experts",
        note="vLLM's own arithmetic differs",
    ),
    Family(
        name="ERNIE-4.5-MoE",
        config="Ernie4_5_MoeConfig",
        values={
            "moe_intermediate_size": 32,
            "moe_num_experts": 8,
            "moe_k": 2,
            "num_experts_per_tok": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        refused_on_cpu="without e_score_correction_bias",
        note="a bias on the scores of experts",
    ),
    Family(
        name="EXAONE-4",
        config="Exaone4Config",
        values=WINDOW | {"sliding_window_pattern": 2},
        refused="which must not be added",
        note="the returned residual is in the hidden states already",
    ),
    Family(
        name="Cohere",
        config="CohereConfig",
        values={"tie_word_embeddings": True},
        refused="which must not be added",
        note="the returned residual is in the hidden states already",
    ),
    Family(
        name="StableLM",
        config="StableLmConfig",
        refused="which must not be added",
        note="the returned residual is in the hidden states already",
    ),
    Family(
        name="Transformers-backend",
        config="SmolLM3Config",
        refused="Transformers backend",
        note="no vLLM class of its own (SmolLM3)",
    ),
)
FAMILY = {family.name: family for family in FAMILIES}
