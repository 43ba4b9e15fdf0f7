"""A tiny chat model with random weights, its tokenizer and conversations: no download, made in a second.

The model exists to make mistakes visible. Its weights are scaled so that, also in bfloat16, the hidden states
of two rows or of two layers differ by far more than rounding does:

- an embedding has standard deviation 1, and what a layer adds to the residual is about as large, so no layer
  is a near copy of the one before;
- attention scores are spread widely, so that a row depends on a few tokens of its own prompt rather than on
  their average: averages over a thousand tokens look alike in every prompt;
- norm weights vary between channels, so a state after the final norm is not a multiple of the one before it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY = 512
HEAD_DIM = 32  # the smallest head that vLLM's CPU and GPU attention kernels have in common

# The special tokens come first in the vocabulary, in this order.
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# transformers' class names by architecture; all of them name their weights as Llama does.
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the river keeps running to the sea.",
    "A model reads every token once and writes down what it thought at each of its layers.",
    "Please explain how the weather in the mountains changes between summer and winter.",
    "She counted 0 1 2 3 4 5 6 7 8 9 stones, then 10, 20 and 300 more, and sat down to rest.",
    "Write a short letter to your neighbour about the garden, the fence and the apple tree.",
    "Questions and answers follow each other: what is asked first is answered first.",
    "Under the old bridge lives a heron that nobody has seen flying for many years.",
    "To bake bread you need flour, water, salt, yeast, a warm kitchen and some patience.",
)
_WORDS = sorted({word.strip(".,:").lower() for sentence in _SENTENCES for word in sentence.split()})

# Shared by some conversations, so that prompts with a common beginning (and thus prefix caching) are covered.
_SYSTEM = (
    "You are a careful assistant who reads the whole question, thinks about the garden, the river and the "
    "mountains, counts to 10 before answering, and never answers more than what was asked in the first place."
)


def make_model(
    folder: Path | str,
    *,
    layers: int = 6,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = VOCABULARY,
    max_len: int = 2048,
    dtype: str = "float32",
    architecture: str = "llama",
    seed: int = 0,
) -> Path:
    """Write config.json and model.safetensors of a random-weight model to `folder`; returns `folder`.

    The same arguments give the same weights. `dtype` is the name of a torch dtype ("float32", "bfloat16") and
    that of the saved weights. Raises ValueError for an architecture or a number of heads it cannot build.
    """
    import torch
    import transformers

    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not one of {', '.join(sorted(ARCHITECTURES))}")
    if heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    config_name, model_name = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_len,
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=SPECIAL_TOKENS.index(IM_END),
        tie_word_embeddings=False,
    )
    model = getattr(transformers, model_name)(config)
    _fill(model, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype)).save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every weight from `generator`, scaled as the head of this module says."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            fan_in = weight.shape[-1]
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:  # final, input and post-attention norms, and q/k norms where there are any
                weight.copy_(1 + 0.25 * noise.clamp(-2, 2))
            elif "embed_tokens" in name:
                weight.copy_(noise)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                # Scores get a standard deviation of about 1.5. Measured: with 3 bfloat16 noise is amplified
                # from layer to layer (19 % after 8 layers), with 1 the rows of one token grow alike.
                weight.copy_(noise * (1.5 / fan_in) ** 0.5)
            elif name.endswith("o_proj.weight"):
                weight.copy_(noise * (4 / fan_in) ** 0.5)  # makes up for the averaging that attention does
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            else:
                weight.copy_(noise * fan_in**-0.5)


def make_tokenizer(folder: Path | str) -> Path:
    """Write a byte-level BPE tokenizer with a ChatML chat template to `folder`; returns `folder`.

    Trained on the sentences above, so it knows any text, needs no network and is the same everywhere.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        extra_special_tokens={"im_start_token": IM_START},
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return Path(folder)


def make_conversations(path: Path | str, n: int, seed: int = 0, *, words: tuple[int, int] = (40, 400)) -> Path:
    """Write `n` ShareGPT-style conversations to `path`, one JSON object a line; returns `path`.

    A conversation has about `words[0]` to `words[1]` words in two to four turns. Each begins with a number of
    its own, so that two prompts differ within their first tokens; only every fourth begins with the same
    system message instead and differs after it.
    """
    rng = random.Random(seed)
    with Path(path).open("w", encoding="utf-8") as lines:
        for number in range(n):
            turns: list[dict[str, str]] = []
            if number % 4 == 3:
                turns.append({"from": "system", "value": _SYSTEM})
            rounds = rng.randint(1, 2)
            budget = rng.randint(*words)
            for turn in range(rounds):
                asked = max(4, budget // (4 * rounds))
                question = f"{number * rounds + turn + 1000}: {_prose(rng, asked)}?"
                turns.append({"from": "human", "value": question})
                turns.append({"from": "gpt", "value": _prose(rng, max(8, budget // rounds - asked)) + "."})
            lines.write(json.dumps({"id": f"tiny-{number}", "conversations": turns}) + "\n")
    return Path(path)


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))
