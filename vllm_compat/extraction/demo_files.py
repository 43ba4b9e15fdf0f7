"""The files of `vllm-compat demo`: written as the consumer's own script writes them, and read back to be compared."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_compat.extraction.streams import say

SAVING_THREADS = 4


def extract(generator: Any, dataset: Any, batch_size: int, out: Path) -> tuple[list[int], float]:
    """Run the generator over `dataset` and write `out/data_N.pt` in the format of the consumer's own script.

    Each file is a dict of `input_ids` (long [tokens]), `hidden_states` (a list with a contiguous
    [tokens, hidden] per layer) and `loss_mask` (long [tokens]). Returns the tokens of each call and the
    seconds spent in all of them.
    """
    import torch

    out.mkdir()
    batches, seconds, written = [], 0.0, []
    with ThreadPoolExecutor(max_workers=SAVING_THREADS) as saving:
        for start in range(0, len(dataset), batch_size):
            batch = dataset[start : start + batch_size]
            before = time.perf_counter()
            results = generator.generate(batch["input_ids"])
            seconds += time.perf_counter() - before
            batches.append(sum(len(result["input_ids"]) for result in results))
            for number, result in enumerate(results):
                sample = {
                    "input_ids": result["input_ids"],
                    "hidden_states": [layer.contiguous() for layer in result["hidden_states"]],
                    # The generator leaves room for one more token; the mask follows the ids.
                    "loss_mask": batch["loss_mask"][number][: len(result["input_ids"])],
                }
                written.append(saving.submit(torch.save, sample, out / f"data_{start + number}.pt"))
            say(f"      {min(start + batch_size, len(dataset))}/{len(dataset)} samples")
        for future in written:
            future.result()
    return batches, seconds


def write_config(generator: Any, seq_length: int, samples: int, data: Path, cache: Path, out: Path) -> None:
    """Write `data_config.json` through the consumer's own class, as its script does."""
    from speculators.data_generation.config_generator import DataGenerationConfig

    config = DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=str(data),
        seq_length=seq_length,
        cache_dir=str(cache),
        num_samples=samples,
    )
    (out / "data_config.json").write_text(json.dumps(config.to_dict(), indent=2), encoding="utf-8")


def read_back(
    out: Path, dataset: Any, seq_length: int, layers: int, dtype: str
) -> tuple[list[list[int]], list[list[Any]], list[str]]:
    """The prompts that went in, the states that the files hold for them, and what is wrong with the files.

    The prompts are taken from the data set, not from the files: a file with another prompt's ids and states
    would agree with itself.
    """
    import torch

    prompts: list[list[int]] = []
    states: list[list[Any]] = []
    problems = []
    found = {path.name for path in out.glob("*.pt")}
    expected = {f"data_{number}.pt" for number in range(len(dataset))}
    if found != expected:
        problems.append(f"missing or unexpected files: {', '.join(sorted(found ^ expected))}")
    for number in range(len(dataset)):
        name, row = f"data_{number}.pt", dataset[number]
        prompt = row["input_ids"][: seq_length - 1]
        prompts.append(prompt.tolist())
        states.append([])
        if name not in found:
            continue
        sample = torch.load(out / name, weights_only=True)
        if set(sample) != {"input_ids", "hidden_states", "loss_mask"}:
            problems.append(f"{name} has the keys {sorted(sample)}")
            continue
        states[-1] = sample["hidden_states"]
        if not torch.equal(sample["input_ids"], prompt):
            problems.append(f"{name}: input_ids are not those of sample {number}")
        if not torch.equal(sample["loss_mask"], row["loss_mask"][: len(prompt)]):
            problems.append(f"{name}: loss_mask is not that of sample {number}")
        dtypes = sorted({str(layer.dtype) for layer in sample["hidden_states"]})
        if len(sample["hidden_states"]) != layers or dtypes != [dtype]:
            problems.append(
                f"{name}: {len(sample['hidden_states'])} layers of {', '.join(dtypes) or 'nothing'}, "
                f"expected {layers} of {dtype}"
            )
        if not all(layer.is_contiguous() for layer in sample["hidden_states"]):
            problems.append(f"{name}: a layer is not contiguous")
    return prompts, states, problems
