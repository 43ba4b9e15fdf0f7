"""Models for which vLLM's CPU build of 0.16 lacks kernels: latent and linear attention, experts, formats."""

from __future__ import annotations

import pytest
from zoo.families import FAMILY
from zoo.record import RIGHT, run

NAMES = [
    "DeepSeek-V3-MLA",
    "Kimi-K2",
    "Kimi-K2.5",
    "Llama-4-text",
    "Llama-FP8",
    "MiniMax-Text-01",
    "Qwen3-Next",
]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_right(name: str, tp: int, active: None) -> None:
    record = run(FAMILY[name], tensor_parallel=tp)
    assert record.verdict == RIGHT, record
    assert record.row_margin is not None
    assert record.row_margin > 0.5
