"""`vllm-compat`: the plan, the patches and the demo, for people and (`--json`) for machines.

Exit codes: 0 fine, 1 a problem, 2 wrong usage. Everything but the demo answers without importing consumer or
runtime.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_compat import __version__
from vllm_compat.errors import CompatError
from vllm_compat.plan import plans
from vllm_compat.registry import Patch, PatchSet, discover

SCHEMA = 1


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(demo=given[:1] == ["demo"]).parse_args(given)
    try:
        return int(arguments.run(arguments))
    except CompatError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would write once more
        return 0


def _parser(*, demo: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-compat", description="Patches that apply when they are needed.")
    parser.add_argument("--version", action="version", version=f"vllm-compat {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("plan", help="which patches apply here, which do not, and why")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--target", type=Path, metavar="DIR", help="judge this site-packages folder instead")
    command.set_defaults(run=_plan)
    command = commands.add_parser("list", help="all patches")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_list)
    command = commands.add_parser("explain", help="everything about one patch")
    command.add_argument("id")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_explain)
    command = commands.add_parser("demo", help="extract from a tiny model, compare every row")
    if demo:  # loaded only when asked for
        module = import_module("vllm_compat.extraction.demo")
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    target: Path | None = arguments.target
    if target is not None and not target.is_dir():
        print(f"vllm-compat: {target} is no folder; give a site-packages folder", file=sys.stderr)
        return 2
    found = plans(target=target)
    if arguments.json:
        _print_json({"plans": [each.as_dict() for each in found], "ok": bool(found) and all(p.ok for p in found)})
    else:
        print("\n\n".join(each.as_text() for each in found) or "no patches are installed")
    return 0 if found and all(each.ok for each in found) else 1


def _list(arguments: argparse.Namespace) -> int:
    sets = discover()
    if arguments.json:
        _print_json({"patches": [_record(each, patch) for each in sets for patch in each.patches]})
    else:
        width = max((len(patch.id) for each in sets for patch in each.patches), default=0)
        for each in sets:
            print(f"{each.name}:")
            for patch in each.patches:
                print(f"  {patch.id:{width}}  {_ranges(patch)}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    known = {patch.id: (each, patch) for each in discover() for patch in each.patches}
    if arguments.id not in known:
        near = difflib.get_close_matches(arguments.id, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`vllm-compat list` shows the known ones"
        raise CompatError(f"no patch is called {arguments.id!r}: {hint}")
    patch_set, patch = known[arguments.id]
    if arguments.json:
        _print_json(_record(patch_set, patch))
        return 0
    decision = next(d for p in plans() for d in p.decisions if d.patch_id == patch.id)
    rows = {
        "patch": patch.id,
        "for": _ranges(patch),
        "here": f"{decision.status} ({decision.reason})",
        "symptom": patch.symptom,
        "cause": patch.cause,
        "does": patch.does,
        "changes": ", ".join(map(str, patch.targets)),
        "after": ", ".join((*patch.after, *patch.needs)),
        "retires": patch.retires.when,
        "evidence": patch.evidence,
    }
    print("\n".join(f"{name + ':':10}{text}" for name, text in rows.items() if text))
    return 0


def _ranges(patch: Patch) -> str:
    return ", ".join(f"{module} {specifier or 'any'}" for module, specifier in patch.ranges.items()) or "always"


def _record(patch_set: PatchSet, patch: Patch) -> dict[str, Any]:
    return {
        "set": patch_set.name,
        "id": patch.id,
        "ranges": dict(patch.ranges),
        "targets": [str(target) for target in patch.targets],
        "shapes": [asdict(shape) for shape in patch.shapes],
        "symptom": patch.symptom,
        "cause": patch.cause,
        "does": patch.does,
        "retires": asdict(patch.retires),
        "evidence": patch.evidence,
        "after": list(patch.after),
        "needs": list(patch.needs),
    }


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps({"schema": SCHEMA, **value}, indent=2))
