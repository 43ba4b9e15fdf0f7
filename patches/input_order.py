"""Seam "input order": speculators 0.4 sorts its results by request id as text, so 10 comes before 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_compat.patches._names import CONSUMER_04, GENERATOR, RETIRES
from vllm_compat.registry import Patch, Rebind, Shape

Results = list[dict[str, Any]]


def in_input_order(original: Callable[[Any, Any], Results]) -> Callable[[Any, Any], Results]:
    @functools.wraps(original)
    def generate(self: Any, token_ids: Any) -> Results:
        results = original(self, token_ids)
        # The ids of one call differ in their last part only, the prompt's number.
        order = sorted(range(len(results)), key=str)
        by_prompt = dict(zip(order, results, strict=True))
        return [by_prompt[index] for index in range(len(results))]

    return generate


PATCH = Patch(
    id="input-order",
    ranges={"speculators": CONSUMER_04, "vllm": ">=0.12.0"},
    targets=(Rebind(module=GENERATOR, name="VllmHiddenStatesGenerator.generate", make=in_input_order),),
    shapes=(Shape(module=GENERATOR, symbol="VllmHiddenStatesGenerator.generate", parameters=("token_ids",)),),
    symptom="No error: from eleven prompts on, results come in another order than the prompts",
    cause="VllmHiddenStatesGenerator.generate walks sorted(request_id_to_idx), and request ids are text",
    does="Puts the results into the order of the prompts; the call boundary compares their token ids.",
    retires=RETIRES,
    evidence="input-order",
)
