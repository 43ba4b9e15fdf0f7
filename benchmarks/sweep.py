"""``extraction.py`` over hidden sizes, captured layers and batch sizes; one JSON file and one plot.

    python benchmarks/sweep.py --json speed.json --plot speed.svg [--tensor-parallel-size N]
    python benchmarks/sweep.py --json speed.json --plot speed.svg --again    # the plot anew, no runs

Needs matplotlib for the plot. Half an hour on a CPU, some minutes on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_model

LAYERS_OF_MODEL = 8
HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 7168], help="hidden sizes")
    parser.add_argument("--captured", type=int, nargs="+", default=[1, 4, 8], help="numbers of captured layers")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="svg, png or pdf, by its name")
    parser.add_argument("--again", action="store_true", help="only the plot, of the JSON file that is there")
    return parser.parse_args()


def run(options: argparse.Namespace, model: Path, captured: int) -> dict[str, Any]:
    """One model and set of layers, in a process of its own."""
    step = LAYERS_OF_MODEL // captured
    layer_ids = range(LAYERS_OF_MODEL - 1, -1, -step)[:captured]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "extraction.py"), "--model", str(model), "--json", str(file)]
        settings = {"tokens": options.tokens, "prompts": options.prompts}
        settings |= {"slow-prompts": 8, "rounds": options.rounds, "tensor-parallel-size": options.tensor_parallel_size}
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        command += ["--batch-size", *map(str, options.batch_size), "--layer-ids", *map(str, sorted(layer_ids))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Bars of tokens per second, one panel for each hidden size; the share of the forward pass above each."""
    from matplotlib.figure import Figure

    sizes = sorted({result["settings"]["hidden"] for result in results})
    figure = Figure(figsize=(6 * len(sizes), 4), layout="constrained")
    for axes, hidden in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        names, position = [], 0
        for result in (each for each in results if each["settings"]["hidden"] == hidden):
            for each in result["batches"]:
                rates = each["tokens_per_second"]
                for way, color in (("forward", "0.85"), ("extraction", "tab:blue"), ("by_value", "tab:orange")):
                    axes.bar(position, rates[way], color=color, label=way if position == 0 else None)
                axes.annotate(
                    f"{each['extraction_over_forward']:.0%}", (position, rates["extraction"]), ha="center", va="bottom"
                )
                names.append(f"{len(result['settings']['layer_ids'])} x {each['batch_size']}")
                position += 1
        axes.set_xticks(range(position), names, rotation=60)
        axes.set_title(f"hidden size {hidden}")
        axes.set_xlabel("captured layers x prompts of a call")
        axes.set_ylabel("tokens/s")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, [name.replace("_", " ") for name in names], loc="outside upper center", ncols=len(names))
    figure.savefig(file)


def main() -> None:
    options = arguments()
    if not options.again:
        results: list[dict[str, Any]] = []
        for hidden in options.hidden:
            with tempfile.TemporaryDirectory() as folder:
                model = make_model(Path(folder) / "model", hidden, LAYERS_OF_MODEL, options.tokens + 1)
                for captured in options.captured:
                    results.append(run(options, model, captured))
                    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(options.json.read_text(encoding="utf-8"))
    for result in results:
        for each in result["batches"]:
            print(
                f"hidden {result['settings']['hidden']}, {len(result['settings']['layer_ids'])} layers, batches of "
                f"{each['batch_size']}: {each['tokens_per_second']['extraction']:.0f} tokens/s, "
                f"{each['extraction_over_forward']:.2f} of forward, {each['extraction_over_by_value']:.1f} by value"
            )
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
