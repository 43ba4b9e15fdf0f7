"""Hidden states per second, as ratios in one run: the consumer's whole ``generate`` against the forward pass alone.

    python benchmarks/extraction.py [--tensor-parallel-size N] [--hidden 2048] [--layers 16] [--prompts 80] ...

Three ways through the same generator, model and prompts, the median of the rounds:

- ``forward``: scheduling, ``execute_model`` and ``sample_tokens``, nothing captured: the most that can be reached;
- ``extraction``: ``generate`` as a user calls it, rows through shared memory;
- ``by value``: the same with the rows pickled through vLLM's message queue and with the one thread that vLLM leaves to
  this process; after the other two, whose memory its garbage would disturb.

Then where the time of ``extraction`` goes, in one more round that waits for the device after each forward pass, so its
sum is more than the undisturbed time. ``--others`` adds, in processes of their own and before the generator's, the
consumer as its users patch it by hand (on vLLM 0.16), Hugging Face with copies to the host, and vLLM's own
``extract_hidden_states`` where the release has it.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import make_model, settings, show

PATH = r" \(/[^)]*\)"  # of an ImportError's text
Batch = list[list[int]]
Way = Callable[[Any, Batch], None]
# Calls from this process to its workers, by what they are for; `sampling` on a GPU is where vLLM waits for the forward
# pass unless the split's own wait has done so.
STEPS = {"execute_model": "forward", "sample_tokens": "sampling", "_get_captured_states": "reply"}
OTHERS = ["hand_patch", "hugging_face", "vllm_extractor"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model that is there (default: one is made)")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=0, help="of a model as DeepSeek-V3; default: a Llama without")
    parser.add_argument("--layer-ids", type=int, nargs="+", default=[2, 8, 13, 15], help="captured layers")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8], help="prompts of a call; several: each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--slow-prompts", type=int, metavar="N", help="prompts of by value, at least one call (default: all)"
    )
    parser.add_argument("--others", nargs="*", choices=OTHERS, help="also these ways to the rows; without a name: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result there")
    options = parser.parse_args()
    if options.others is not None:
        options.others = options.others or OTHERS
    return options


def random_prompts(count: int, tokens: int) -> list[list[int]]:
    from vllm_compat.extraction.tiny import VOCABULARY

    source = random.Random(0)
    return [[source.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def forward(generator: Any, prompts: list[list[int]]) -> None:
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


def extraction(generator: Any, prompts: list[list[int]]) -> None:
    generator.generate(prompts)


def by_value(generator: Any, prompts: list[list[int]]) -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator.executor._can_map = False
    try:
        generator.generate(prompts)
    finally:
        generator.executor._can_map = True
        torch.set_num_threads(threads)


def in_batches(way: Way, generator: Any, batches: list[Batch]) -> float:
    begin = time.perf_counter()
    for batch in batches:
        way(generator, batch)
    return time.perf_counter() - begin


def rates(ways: tuple[Way, ...], generator: Any, batches: list[Batch], rounds: int) -> dict[str, float]:
    """Tokens per second of each way: the median of the rounds, in which the ways take turns."""
    for way in ways:
        way(generator, batches[0])  # warm up
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seconds[way.__name__].append(in_batches(way, generator, batches))
    tokens = sum(len(prompt) for batch in batches for prompt in batch)
    return {name: tokens / statistics.median(each) for name, each in seconds.items()}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def split(generator: Any, batches: list[Batch]) -> dict[str, float]:
    """Seconds of all batches, by part; ``slicing`` is the consumer's cutting and copying of what it was handed."""
    seconds: dict[str, float] = dict.fromkeys(["scheduling", *STEPS.values(), "slicing"], 0.0)
    rpc, schedule = generator.executor.collective_rpc, generator.scheduler.schedule
    handed_over = 0.0

    @functools.wraps(rpc)
    def timed_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal handed_over
        begin = time.perf_counter()
        reply = rpc(method, *args, **kwargs)
        handed_over = time.perf_counter()
        if method in STEPS:
            seconds[STEPS[method]] += handed_over - begin
        return reply

    @functools.wraps(schedule)
    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        step = schedule(*args, **kwargs)
        seconds["scheduling"] += time.perf_counter() - begin
        return step

    def watch(worker: Any) -> None:
        import time

        import torch

        runner, copies = worker.model_runner, worker._vllm_compat_capture._copies
        run, finish = runner.execute_model, copies.finish
        worker.benchmark_copy = 0.0

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            if runner.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # not the copies' own stream
            return output

        def timed_finish() -> Any:
            begin = time.perf_counter()
            result = finish()
            worker.benchmark_copy += time.perf_counter() - begin
            return result

        runner.execute_model, copies.finish = execute_model, timed_finish
        worker.benchmark_undo = lambda: (setattr(runner, "execute_model", run), setattr(copies, "finish", finish))

    def unwatch(worker: Any) -> float:
        worker.benchmark_undo()
        return float(worker.benchmark_copy)

    rpc(watch)
    generator.executor.collective_rpc, generator.scheduler.schedule = timed_rpc, timed_schedule
    total = 0.0
    try:
        for batch in batches:
            begin = time.perf_counter()
            generator.generate(batch)
            end = time.perf_counter()
            total += end - begin
            seconds["slicing"] += end - handed_over
    finally:
        del generator.executor.collective_rpc, generator.scheduler.schedule
        copy = rpc(unwatch)[0]
    seconds["rest"] = total - sum(seconds.values())
    # The worker waits for its copies while it makes the reply.
    return {**seconds, "reply": seconds["reply"] - copy, "copy": copy}


def bus_rate(generator: Any) -> float | None:
    """Bytes per second that one copy of device memory to the shared, page-locked rows can reach; None on a CPU."""

    def copy(worker: Any) -> float | None:
        import time

        import torch

        capture = worker._vllm_compat_capture
        if not capture._keeps_rows or not capture._host.is_pinned:
            return None
        target = torch.frombuffer(capture._host.memory.memory, dtype=torch.uint8)
        source = torch.zeros(len(target), dtype=torch.uint8, device=worker.model_runner.device)
        seconds = []
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return len(target) / min(seconds)

    rate: float | None = generator.executor.collective_rpc(copy)[0]
    return rate


def others(folder: Path, options: argparse.Namespace) -> dict[str, float | str]:
    """Tokens per second of each other way, or the last error. A process each: this one opens no device."""
    found: dict[str, float | str] = {}
    for way in options.others or ():
        with tempfile.NamedTemporaryFile("r") as file:
            script = str(Path(__file__).with_name("others.py"))
            command = [sys.executable, script, way, str(folder), json.dumps(settings(options)), file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[way] = float(file.read())
            else:
                errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", done.stderr, re.MULTILINE)
                found[way] = f"did not run: {re.sub(PATH, '', errors[-1]) if errors else done.returncode}"
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    import vllm_compat

    if options.model is None:
        make_model(folder, options.hidden, options.layers, options.tokens + 1, options.experts)
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options.hidden, options.layers = config["hidden_size"], config["num_hidden_layers"]
        options.experts = config.get("n_routed_experts", 0)
    extra = others(folder, options)
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(
        str(folder),
        layer_ids=options.layer_ids,
        max_model_len=options.tokens + 1,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    prompts = random_prompts(options.prompts, options.tokens)
    results = []
    for size in options.batch_size:
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        slow = batches[: max(1, (options.slow_prompts or len(prompts)) // size)]
        rate = rates((forward, extraction), generator, batches, options.rounds)
        faults = page_faults()
        in_batches(extraction, generator, batches)
        faults = page_faults() - faults
        parts = split(generator, batches)
        rate |= rates((by_value,), generator, slow, options.rounds)
        results.append(
            {
                "batch_size": size,
                "tokens_per_second": rate,
                "extraction_over_forward": rate["extraction"] / rate["forward"],
                "extraction_over_by_value": rate["extraction"] / rate["by_value"],
                "seconds_of_a_round": parts,
                "page_faults_of_a_round": faults,
            }
        )
    bus = bus_rate(generator)
    generator.executor.shutdown()
    return {
        "versions": vllm_compat.status()["consumers"][0]["versions"],
        "settings": settings(options),
        "threads": torch.get_num_threads(),
        "bytes_per_token": len(set(options.layer_ids)) * options.hidden * 2,
        "bus_bytes_per_second": bus,
        "others_tokens_per_second": extra,
        "batches": results,
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = []
    for each in result["batches"]:
        lines.append(f"batches of {each['batch_size']}")
        lines += [f"{name:>16}  {rate:>10.0f} tokens/s" for name, rate in each["tokens_per_second"].items()]
        lines.append(f"    over forward  {each['extraction_over_forward']:>10.2f}")
        lines.append(f"   over by value  {each['extraction_over_by_value']:>10.2f}")
        moved = each["tokens_per_second"]["extraction"] * result["bytes_per_token"]
        bus = result["bus_bytes_per_second"]
        lines.append(f"      rows moved  {moved / 1e9:>10.1f} GB/s" + (f" (bus: {bus / 1e9:.0f})" if bus else ""))
        lines.append(f"     page faults  {each['page_faults_of_a_round']:>10} a round")
        whole = sum(each["seconds_of_a_round"].values())
        parts = sorted(each["seconds_of_a_round"].items(), key=lambda part: -part[1])
        lines.append("  time: " + ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts))
    for name, rate in result["others_tokens_per_second"].items():
        lines.append(f"{name:>16}  " + (f"{rate:>10.0f} tokens/s" if isinstance(rate, float) else str(rate)))
    return lines


def main() -> None:
    options = arguments()
    import vllm_compat  # noqa: F401 - before the consumer

    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, options.model or Path(folder) / "model")
    show(result, options.json, table(result))


if __name__ == "__main__":
    main()
