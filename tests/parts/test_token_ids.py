"""Token ids do not depend on the transformers that a vLLM admits: the consumer's own preprocessing of three fixed
conversations gives what it gave on transformers 4.57, whose results are `token_ids.json`.

After a change of the conversations or of the tiny tokenizer: run this file as a program on transformers 4.57.
"""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).with_name("token_ids.json")
CONVERSATIONS = [
    [
        {"from": "human", "value": "How does the weather in the mountains change between summer and winter?"},
        {"from": "gpt", "value": "In summer it is 20 degrees; in winter the river freezes."},
    ],
    [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "  Two spaces, a tab\there,\n\nand an empty line. "},
        {"role": "assistant", "content": "Größe, naïve café, 雪, 🐦 and <|im_end|> as text."},
        {"role": "user", "content": "And 1234567890?"},
        {"role": "assistant", "content": "1, 2, 3 …"},
    ],
    [
        {"from": "human", "value": "Write a letter about the garden. " * 12},
        {"from": "gpt", "value": "Dear neighbour, the fence and the apple tree are fine. " * 30},  # is cut
    ],
]


def token_ids(folder: Path) -> dict[str, Any]:
    """``input_ids`` and ``loss_mask`` of each conversation, by `speculators`, with the tokenizer loaded as it does."""
    from datasets import Dataset
    from speculators.data_generation.preprocessing import build_eagle3_dataset
    from transformers import AutoTokenizer

    from vllm_compat.extraction.tiny import make_tokenizer

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    data = Dataset.from_list([{"conversations": _named_alike(each)} for each in CONVERSATIONS])
    made = build_eagle3_dataset(data, tokenizer, max_length=256, num_proc=1)
    return {name: [each.tolist() for each in made[name]] for name in ("input_ids", "loss_mask")}


def _named_alike(conversation: list[dict[str, str]]) -> list[dict[str, str]]:
    """A table has one name for each column; the consumer knows both."""
    return [{"role": next(iter(turn.values())), "content": list(turn.values())[1]} for turn in conversation]


def test_token_ids_are_those_of_transformers_4(active: None, tmp_path: Path) -> None:
    committed = json.loads(COMMITTED.read_text())
    assert committed.pop("transformers").startswith("4.57.")
    assert token_ids(tmp_path) == committed
    lengths = [len(ids) for ids in committed["input_ids"]]
    assert lengths[2] == 256
    assert all(0 < sum(mask) < length for mask, length in zip(committed["loss_mask"], lengths, strict=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        COMMITTED.write_text(json.dumps({"transformers": metadata.version("transformers"), **token_ids(Path(made))}))
