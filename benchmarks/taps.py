"""What the taps cost in one step: the model's forward in a worker with and without them, as a ratio in one run.

    python benchmarks/taps.py [--hidden 1024] [--layers 16] [--layer-ids 2 8 13 15] [--tokens 1024] [--rounds 15]

Three states of one model, interleaved, the median of the rounds: ``bare`` (no hooks), ``idle`` (hooks, but no call is
open, as in vLLM's warm-up) and ``taps`` (each tapped layer's residual added and kept). What follows the step, the copy
to host memory and the hand-over, is in ``benchmarks/extraction.py``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import make_model, settings, show


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-ids", type=int, nargs="+", default=[2, 8, 13, 15], help="tapped layers")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole result there")
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import vllm_compat

    make_model(folder, options.hidden, options.layers, options.tokens + 1)
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(str(folder), layer_ids=options.layer_ids, max_model_len=options.tokens + 1)

    def in_worker(worker: Any, tokens: int, rounds: int) -> dict[str, float]:  # travels by value
        import statistics
        import time

        from vllm_compat.patches.worker.capture import Step

        runner, capture = worker.model_runner, worker._vllm_compat_capture
        layers = runner.get_model().model.layers
        hooks = [dict(layer._forward_hooks) for layer in layers]
        capture._place = lambda *args: None  # where the rows go has no part in this
        seconds: dict[str, list[float]] = {"bare": [], "idle": [], "taps": []}
        for turn in range(rounds + 1):
            for way, times in seconds.items():
                for layer, own in zip(layers, hooks, strict=True):
                    layer._forward_hooks.clear()
                    layer._forward_hooks.update({} if way == "bare" else own)
                step = Step(None)
                capture._book, capture._step = (object(), step) if way == "taps" else (None, None)
                begin = time.perf_counter()
                runner._dummy_run(tokens)
                if runner.device.type == "cuda":
                    import torch

                    torch.cuda.synchronize()
                if turn:  # the first warms up
                    times.append(time.perf_counter() - begin)
                if way == "taps" and step.layers != set(capture.layer_ids):
                    raise RuntimeError("the taps have not seen the layers")
        capture._book = capture._step = None
        del capture._place
        return {way: statistics.median(times) for way, times in seconds.items()}

    (seconds,) = generator.executor.collective_rpc(in_worker, args=(options.tokens, options.rounds))
    generator.executor.shutdown()
    return {
        "versions": vllm_compat.status()["consumers"][0]["versions"],
        "settings": settings(options),
        "seconds_of_a_step": seconds,
        "taps_over_bare": seconds["taps"] / seconds["bare"],
        "idle_over_bare": seconds["idle"] / seconds["bare"],
    }


def main() -> None:
    options = arguments()
    import vllm_compat  # noqa: F401 - before the consumer

    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder) / "model")
    lines = [f"{name:>6}  {seconds * 1000:>8.2f} ms" for name, seconds in result["seconds_of_a_step"].items()]
    lines.append(f"taps / bare {result['taps_over_bare']:.3f}, idle / bare {result['idle_over_bare']:.3f}")
    show(result, options.json, lines)


if __name__ == "__main__":
    main()
