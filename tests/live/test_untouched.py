"""vLLM is never touched: its modules and classes hold the same objects before and after, by identity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import ast, importlib, importlib.util, json, os, pathlib, sys, types

CONSUMER = "speculators.data_generation.vllm_hidden_states_generator"


def imported():
    """What the consumer's module imports, by its own names, without importing the consumer."""
    package = importlib.util.find_spec("speculators").submodule_search_locations[0]
    found = {}
    for node in ast.walk(ast.parse(pathlib.Path(package, *CONSUMER.split(".")[1:]).with_suffix(".py").read_text())):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name: importlib.import_module(each.name) for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = importlib.import_module(node.module)
            found |= {each.asname or each.name: getattr(module, each.name, None) for each in node.names}
    return found


def attributes():
    """Every name in every loaded module of vLLM and in every class defined there -> the object itself."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in ("vllm", "transformers") or not isinstance(module, types.ModuleType):
            continue
        for key, value in vars(module).items():
            found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for attribute, entry in vars(value).items():
                    found[f"{name}:{key}.{attribute}"] = entry
                found[f"{name}:{key}.__bases__"] = value.__bases__
    return found


def changed(before, after, only=None):
    return sorted(
        name for name, value in before.items()
        if (only is None or isinstance(value, only)) and after.get(name, attributes) is not value
        and not name.endswith(("__annotations__", "__bases__"))
        or name.endswith("__bases__") and after.get(name) != value
    )


if __name__ == "__main__":
    # vLLM, and what is lent for the consumer's import; the start-up file waits for the consumer.
    import transformers.configuration_utils
    originals = imported()
    before, there = attributes(), set(sys.modules)
    import vllm_compat
    consumer = importlib.import_module(CONSUMER)
    after = attributes()
    patched = sorted(key for key, value in originals.items() if vars(consumer)[key] is not value)
    activation = changed(before, after)
    # Nothing that was lent stays. (Submodules that the consumer is the first to import are attributes of packages, and
    # transformers' lazy packages keep what they have been asked for. Reading a class's annotations makes them.)
    added = sorted(
        name for name in after.keys() - before.keys()
        if name.partition(":")[0] in there and type(sys.modules[name.partition(":")[0]]) is types.ModuleType
        and not isinstance(after[name], types.ModuleType) and not name.endswith("__annotations__")
    )

    callables = (types.FunctionType, type, classmethod, staticmethod, property)
    before = attributes()
    generator = consumer.VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[1], max_model_len=64)
    generator.generate([[5, 6, 7]])
    # vLLM fills its own caches and globals while it runs; its code stays what it was.
    extraction = changed(before, attributes(), only=callables)
    generator.executor.shutdown()
    vllm_compat.deactivate()
    left = sorted(
        key for key, value in originals.items() if vars(consumer)[key] is not value and value is not None
    )
    print("RESULT " + json.dumps({"looked_at": len(before), "patched": patched, "activation": activation,
                                  "added": added, "extraction": extraction, "left": left}))
'''


def test_vllm_is_the_same_before_and_after_by_identity(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "identity.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, model], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["looked_at"] > 10_000
    assert {"Request", "Scheduler", "MultiprocExecutor", "CacheConfig", "torch"} <= set(result["patched"])
    assert result["activation"] == []
    assert result["added"] == []
    assert result["extraction"] == []
    assert result["left"] == []
