"""What the benchmarks share: the model they run, and how they end.

python benchmarks/common.py DIR [--hidden 2048] [--layers 16] [--experts N] [--device cuda]    # only the model
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD_DIM = 64


def make_model(folder: Path, hidden: int, layers: int, max_len: int, experts: int = 0, device: str = "cpu") -> Path:
    """A random bfloat16 model with its tokenizer.

    Without experts a Llama; at hidden size 2048 and 16 layers the shape of Llama-3.2-1B. With experts a DeepSeek-V3,
    whose classes Kimi-K2 has too: latent attention of the published widths, a dense layer, then layers of experts.

    One layer of each kind is drawn and copied to the others: what a kernel costs does not depend on it, and 7 GB of
    noise take a minute on the CPU. device: which one draws; a process that starts vLLM later must not open a GPU.
    """
    import torch
    import transformers

    from vllm_compat.extraction.tiny import make_tokenizer

    config = _deepseek(hidden, layers, max_len, experts) if experts else _llama(hidden, layers, max_len)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(0)
    decoder = model.model
    drawn = decoder.layers[: 2 if experts else 1]
    with torch.no_grad():
        for part in (*drawn, decoder.embed_tokens, decoder.norm, model.lm_head):
            for weight in part.parameters():
                if weight.dim() == 1:
                    weight.fill_(1)
                else:
                    noise = torch.empty_like(weight, device=device)
                    weight.copy_(noise.normal_(std=weight.shape[-1] ** -0.5, generator=generator))
            for buffer in part.buffers():  # the correction of the experts' scores
                buffer.zero_()
        for layer in decoder.layers[len(drawn) :]:
            layer.load_state_dict(drawn[-1].state_dict())
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def _llama(hidden: int, layers: int, max_len: int) -> Any:
    import transformers

    from vllm_compat.extraction.tiny import VOCABULARY

    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=max(1, hidden // HEAD_DIM // 4),
        head_dim=HEAD_DIM,
        max_position_embeddings=max_len,
        dtype="bfloat16",
    )


def _deepseek(hidden: int, layers: int, max_len: int, experts: int) -> Any:
    import transformers

    from vllm_compat.extraction.tiny import VOCABULARY

    heads = max(16, hidden // 56)  # 128 at 7168, as published
    return transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=experts,
        num_experts_per_tok=min(8, experts),
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # these two are in the published configuration, and vLLM asks for them
        scoring_func="sigmoid",
        rope_scaling=None,
        max_position_embeddings=max_len,
        dtype="bfloat16",
    )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without where the result goes."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "model")}


def show(result: dict[str, Any], file: Path | None, table: Iterable[str]) -> None:
    """Print the lines of the short table; the whole result goes to the file, if one was asked for."""
    print("\n".join(table))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random model, for extraction.py --model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=0, help="of a model as DeepSeek-V3; default: a Llama without")
    parser.add_argument("--max-len", type=int, default=4096, help="positions of the model")
    parser.add_argument("--device", default="cpu", help="that draws the weights: cuda is faster by far")
    options = parser.parse_args()
    make_model(options.folder, options.hidden, options.layers, options.max_len, options.experts, options.device)


if __name__ == "__main__":
    main()
