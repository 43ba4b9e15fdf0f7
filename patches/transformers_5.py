"""Seam "transformers 5": what speculators 0.3.0 finds in transformers 4 while it is imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from vllm_compat.patches._names import CONSUMER, CONSUMER_03, RETIRES
from vllm_compat.registry import Lend, Patch, Shape, Undo

MASK_UTILS = "transformers.modeling_attn_mask_utils"


def lend_torch() -> Undo:
    """``torch``, which transformers 5 imports for type checkers only, where pydantic looks its annotations up.

    Every class of the consumer that needs it is made during ``import speculators`` (its registry imports them all).
    """
    import torch
    import transformers.configuration_utils as module

    if hasattr(module, "torch"):
        return lambda: None
    module.torch = torch

    def take_back() -> None:
        if vars(module).get("torch") is torch:
            del module.torch

    return take_back


def lend_mask_utils() -> Undo:
    module: Any = ModuleType(MASK_UTILS)
    module._prepare_4d_causal_attention_mask = no_mask
    sys.modules[MASK_UTILS] = module

    def take_back() -> None:
        if sys.modules.get(MASK_UTILS) is module:
            del sys.modules[MASK_UTILS]

    return take_back


def no_mask(*args: Any, **kwargs: Any) -> None:
    """In place of a function of transformers that the forward of ``EagleSpeculator`` calls, and extraction does not.

    Raises:
        RuntimeError: always.
    """
    from importlib import metadata

    raise RuntimeError(
        f"vllm_compat: transformers {metadata.version('transformers')} has no _prepare_4d_causal_attention_mask, which "
        "EagleSpeculator of speculators 0.3.0 needs for its forward. Extraction works; to run this model, use "
        "transformers before 5.24."
    )


ANNOTATIONS = Patch(
    id="transformers-5",
    ranges={"speculators": CONSUMER, "transformers": ">=5"},
    targets=(Lend(module="speculators", name="transformers.configuration_utils.torch", do=lend_torch),),
    shapes=(
        Shape(module="transformers.configuration_utils", symbol="PreTrainedConfig"),
        Shape(module="speculators.config", symbol="SpeculatorModelConfig"),
    ),
    symptom="PydanticUndefinedAnnotation: name 'torch' is not defined, at `import speculators`",
    cause=(
        "transformers 5 imports torch for type checkers only (transformers/configuration_utils.py), and pydantic "
        "resolves the annotations there for the consumer's configuration classes"
    ),
    does="Lends torch to transformers.configuration_utils while speculators is imported, and takes it back.",
    retires=RETIRES,
    evidence="transformers-5",
)

MASKS = Patch(
    id="transformers-5-masks",
    ranges={"speculators": CONSUMER_03, "transformers": ">=5.24"},
    targets=(Lend(module="speculators", name=MASK_UTILS, do=lend_mask_utils),),
    shapes=(Shape(module="speculators.models.eagle", symbol="_prepare_4d_causal_attention_mask"),),
    symptom=f"ModuleNotFoundError: No module named '{MASK_UTILS}', at `import speculators`",
    cause="transformers 5.24 has dropped the module; speculators/models/eagle.py imports a function from it",
    does=(
        "Lends a module of that name while speculators is imported, and takes it back. Its function, which extraction "
        "does not call, raises."
    ),
    retires=RETIRES,
    evidence="transformers-5-masks",
)
