"""Seam "tokenizer": remote code is trusted for the tokenizer as the consumer already does for the configuration."""

from __future__ import annotations

from typing import Any

from vllm_compat.patches._names import CONSUMER, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape


def trusting_tokenizer(original: Any) -> Any:
    class TrustingAutoTokenizer(original):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("trust_remote_code", True)
            return original.from_pretrained(*args, **kwargs)

    return TrustingAutoTokenizer


PATCH = Patch(
    id="tokenizer",
    ranges={"speculators": CONSUMER, "vllm": ">=0.11.0"},
    targets=(Rebind(module=GENERATOR, name="AutoTokenizer", make=trusting_tokenizer),),
    shapes=(Shape(module=GENERATOR, symbol="AutoTokenizer"),),
    symptom="ValueError: ... contains custom code which must be executed to correctly load the model",
    cause=(
        "VllmHiddenStatesGenerator.__init__ trusts remote code for AutoConfig and vLLM, and forgets AutoTokenizer "
        "(speculators#988)"
    ),
    does="Loads the tokenizer of the same folder with the same trust, unless the caller says otherwise.",
    retires=RETIRES,
    evidence="tokenizer",
)
