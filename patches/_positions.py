"""Rotary embeddings that vLLM scales otherwise than Hugging Face: said before the model loads, and by ``plan --model``.

The rows are then what this vLLM serves, each at its place, but not what Hugging Face computes. Read in
vllm/model_executor/layers/rotary_embedding (0.11.0, 0.16.0, 0.25.1, 0.32.0) and transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_compat.patches._models import rope_of, rope_type
from vllm_compat.source import Sources

YARN = "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope"
LONG = "vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope"
WHAT_THEN = (
    "Hidden states are then what this vLLM serves, not what Hugging Face computes, and `vllm-compat verify` differs"
)


def differences(
    text: Mapping[str, Any], *, max_model_len: int | None = None, path: Sequence[str] | None = None
) -> Iterator[str]:
    """Why positions come out otherwise, from a text model's configuration.

    Args:
        max_model_len: None where it is not known yet.
        path: where vLLM is looked for (default: ``sys.path``).
    """
    for rope in _ropes(text):
        kind = rope_type(rope)
        if kind == "dynamic" and "alpha" not in rope and rope.get("factor") != 1:
            yield (
                "rope type dynamic: vLLM scales the base for all prompts, Hugging Face only for those longer than "
                "max_position_embeddings"
            )
        if kind in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
            if isinstance(original, int | float) and (max_model_len is None or max_model_len > original):
                which = "all prompts" if _one_choice(path) else "all prompts of a step in which one is longer"
                yield (
                    f"rope type {kind}: with max_model_len over {original} vLLM takes long factors for {which}, "
                    f"Hugging Face only for those of more than {original} tokens"
                )
        if kind == "yarn" and not text.get("kv_lora_rank") and not _as_hugging_face(path):
            try:
                theirs, ours = _magnitude(rope)
            except (TypeError, ValueError, ArithmeticError):  # no numbers: transformers and vLLM refuse them
                continue
            if not math.isclose(theirs, ours, rel_tol=1e-3):
                yield (
                    f"rope type yarn: this vLLM reads no attention_factor and no mscale: it multiplies by {ours:.4g}, "
                    f"Hugging Face by {theirs:.4g}"
                )


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One, or one for each kind of layers."""
    rope = rope_of(text)
    inner = [each for each in rope.values() if isinstance(each, Mapping)]
    return inner or [rope]


def _one_choice(path: Sequence[str] | None) -> bool:
    """Whether vLLM chooses the factors once for all; 0.11.0 does in each step."""
    source = Sources(path)(LONG)
    node = source.find("Phi3LongRoPEScaledRotaryEmbedding.__init__", whole=True) if source is not None else None
    return node is None or "use_long_rope" in ast.unparse(node)


def _as_hugging_face(path: Sequence[str] | None) -> bool:
    """Later releases read what Hugging Face reads; without vLLM there is nothing to say."""
    source = Sources(path)(YARN)
    if source is None:
        return True
    node = source.find("YaRNScalingRotaryEmbedding.__init__")
    return isinstance(node, ast.FunctionDef) and any(
        each.arg == "attention_factor" for each in (*node.args.args, *node.args.kwonlyargs)
    )


def _magnitude(rope: Mapping[str, Any]) -> tuple[float, float]:
    """What Hugging Face, and what vLLM without ``attention_factor``, multiply cosine and sine by."""
    factor = float(rope.get("factor", 1))

    def magnitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if (given := rope.get("attention_factor")) is not None:
        theirs = float(given)
    elif mscale and of_all:
        theirs = magnitude(mscale) / magnitude(of_all)
    else:
        theirs = magnitude()
    ours = magnitude() if rope.get("apply_yarn_scaling", True) else 1.0
    return theirs, ours * float(rope.get("attn_factor", 1))
