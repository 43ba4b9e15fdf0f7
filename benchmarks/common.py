"""What the benchmarks share: the model they run, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD_DIM = 64


def make_model(folder: Path, hidden: int, layers: int, max_len: int) -> Path:
    """A random bfloat16 Llama with its tokenizer; at hidden size 2048 and 16 layers the shape of Llama-3.2-1B.

    One layer is drawn and copied to all: what a kernel costs does not depend on it, and 7 GB of noise take a minute.
    """
    import torch
    import transformers

    from vllm_compat.extraction.tiny import VOCABULARY, make_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 4,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_len,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    first = model.model.layers[0]
    with torch.no_grad():
        for part in (first, model.model.embed_tokens, model.model.norm, model.lm_head):
            for weight in part.parameters():
                if weight.dim() == 1:
                    weight.fill_(1)
                else:
                    weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
        for layer in model.model.layers[1:]:
            layer.load_state_dict(first.state_dict())
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def show(result: dict[str, Any], file: Path | None, table: Iterable[str]) -> None:
    """Print the lines of the short table; the whole result goes to the file, if one was asked for."""
    print("\n".join(table))
    if file is not None:
        file.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
