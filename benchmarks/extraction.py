"""Hidden states per second, as ratios in one run: the consumer's whole ``generate`` against the forward pass alone.

    python benchmarks/extraction.py [--tensor-parallel-size N] [--hidden 2048] [--layers 16] [--prompts 80] ...

Three ways through the same generator, model and prompts, interleaved, the median of the rounds:

- ``forward``: scheduling, ``execute_model`` and ``sample_tokens``, nothing captured: the most that can be reached;
- ``extraction``: ``generate`` as a user calls it, rows through shared memory;
- ``by value``: the same with the rows pickled through vLLM's message queue, as the consumer's own hand-over does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-ids", type=int, nargs="+", default=[2, 8, 13, 15], help="captured layers")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def forward_only(generator: Any, prompts: list[list[int]]) -> None:
    """The consumer's loop without its capture calls: no book is open in the workers, so their taps do nothing."""
    from speculators.data_generation import vllm_hidden_states_generator as module

    from vllm_compat.patches._generator import generator_in_use

    with generator_in_use(generator):
        for number, prompt in enumerate(prompts):
            request = module.Request(
                request_id=f"forward_{number}",
                prompt_token_ids=prompt,
                sampling_params=module.SamplingParams(max_tokens=1, temperature=0.0),
                pooling_params=None,
                eos_token_id=None,
            )
            generator.scheduler.add_request(request)
        while (step := generator.scheduler.schedule()).total_num_scheduled_tokens:
            generator.executor.execute_model(step)
            for request_id in step.num_scheduled_tokens:
                generator.scheduler.finish_requests([request_id], module.RequestStatus.FINISHED_ABORTED)


def by_value(generator: Any, prompts: list[list[int]]) -> None:
    generator.executor._can_map = False
    try:
        generator.generate(prompts)
    finally:
        generator.executor._can_map = True


def extraction(generator: Any, prompts: list[list[int]]) -> None:
    generator.generate(prompts)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import vllm_compat
    from vllm_compat.extraction.tiny import VOCABULARY, make_model, make_tokenizer

    heads = options.hidden // 128
    make_model(folder, layers=options.layers, hidden=options.hidden, heads=heads, kv_heads=heads, dtype="bfloat16")
    make_tokenizer(folder)
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(
        str(folder),
        layer_ids=options.layer_ids,
        max_model_len=options.tokens + 1,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    source = random.Random(0)
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(options.tokens)] for _ in range(options.prompts)]
    batches = [prompts[start : start + options.batch_size] for start in range(0, len(prompts), options.batch_size)]
    ways = (forward_only, extraction, by_value)
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for way in ways:
        way(generator, batches[0])  # warm up
    for _ in range(options.rounds):
        for way in ways:
            begin = time.perf_counter()
            for batch in batches:
                way(generator, batch)
            seconds[way.__name__].append(time.perf_counter() - begin)
    tokens = options.prompts * options.tokens
    rate = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    generator.executor.shutdown()
    return {
        "versions": vllm_compat.status()["consumers"][0]["versions"],
        "settings": vars(options),
        "tokens_per_second": rate,
        "extraction_over_forward": rate["extraction"] / rate["forward_only"],
        "extraction_over_by_value": rate["extraction"] / rate["by_value"],
    }


def main() -> None:
    options = arguments()
    import vllm_compat  # noqa: F401 - before the consumer

    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder) / "model")
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:>14}  {rate:>10.0f} tokens/s")
    print(f"extraction / forward  {result['extraction_over_forward']:.2f}")
    print(f"extraction / by value {result['extraction_over_by_value']:.2f}")


if __name__ == "__main__":
    main()
