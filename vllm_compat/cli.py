"""`vllm-compat`: the plan, the patches and the extraction, for people and (`--json`) for machines.

Exit codes: 0 fine, 1 a problem, 2 wrong usage. Everything but the commands of `extraction` answers without importing
consumer or runtime.
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
from vllm_compat.questions import ask
from vllm_compat.registry import Patch, PatchSet, discover

SCHEMA = 1
_EXTRACTION = {  # commands that load consumer and runtime; each is a module of `vllm_compat.extraction`
    "demo": "extract from a tiny model, compare every row",
    "extract": "from conversations to files of hidden states",
    "verify": "compare a folder of hidden states with Hugging Face",
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(given[0] if given else "").parse_args(given)
        return int(arguments.run(arguments))
    except CompatError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would write once more
        return 0


def _parser(given: str) -> argparse.ArgumentParser:
    """`given`: the command that was given; what others alone need is not loaded."""
    parser = argparse.ArgumentParser(prog="vllm-compat", description="Patches that apply when they are needed.")
    parser.add_argument("--version", action="version", version=f"vllm-compat {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("plan", help="which patches apply here, which do not, and why")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--target", type=Path, metavar="DIR", help="judge this site-packages folder instead")
    if given == "plan":
        for question in (question for each in discover() for question in each.questions):
            command.add_argument(
                f"--{question.name}", dest=f"question:{question.name}", metavar=question.metavar, help=question.help
            )
    command.set_defaults(run=_plan)
    command = commands.add_parser("list", help="all patches")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_list)
    command = commands.add_parser("explain", help="everything about one patch")
    command.add_argument("id")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_explain)
    command = commands.add_parser("doctor", help="the plan, the routes that are live, and what the machine lacks")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--target", type=Path, metavar="DIR", help="look at this site-packages folder instead")
    if given == "doctor":
        _add_options(command)
    command.set_defaults(run=_doctor)
    command = commands.add_parser(
        "run", help="start a script with patches where the start-up file cannot act", usage="%(prog)s [-m] SCRIPT ..."
    )
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    command.add_argument("script", metavar="SCRIPT")
    command.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    command.set_defaults(run=_run)
    command = commands.add_parser("sitecustomize-dir", help="the folder that does the same on PYTHONPATH")
    command.set_defaults(run=_sitecustomize_dir)
    for name, words in _EXTRACTION.items():
        command = commands.add_parser(name, help=words)
        if given == name:
            module = import_module(f"vllm_compat.extraction.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    """The options that the checks of installed patch sets read."""
    for option in (option for each in discover() for option in each.options):
        kind = int if isinstance(option.default, int) else str
        words = option.help if option.default is None else f"{option.help} (default {option.default})"
        command.add_argument(
            f"--{option.name}",
            dest=f"option:{option.name}",
            default=option.default,
            type=kind,
            metavar="N" if kind is int else "DIR",
            help=words,
        )


def _named(arguments: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The options that patch sets brought, by their own names."""
    return {name.removeprefix(prefix): value for name, value in vars(arguments).items() if name.startswith(prefix)}


def _no_folder(target: Path | None) -> bool:
    if target is None or target.is_dir():
        return False
    print(f"vllm-compat: {target} is no folder; give a site-packages folder", file=sys.stderr)
    return True


def _doctor(arguments: argparse.Namespace) -> int:
    from vllm_compat.doctor import diagnose

    if _no_folder(arguments.target):
        return 2
    found = diagnose(target=arguments.target, options=_named(arguments, "option:"))
    if arguments.json:
        _print_json(found.as_dict())
    else:
        print(found.as_text())
    return 0 if found.ok else 1


def _run(arguments: argparse.Namespace) -> int:
    from vllm_compat.launch import run

    run(arguments.script, arguments.arguments, module=arguments.module)
    return 0


def _sitecustomize_dir(arguments: argparse.Namespace) -> int:
    from vllm_compat.launch import sitecustomize_dir

    print(sitecustomize_dir())
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    target: Path | None = arguments.target
    if _no_folder(target):
        return 2
    found = plans(target=target)
    asked = {name: value for name, value in _named(arguments, "question:").items() if value is not None}
    answers = list(ask(discover(), found, target, asked)) if asked else []
    ok = bool(found) and all(each.ok for each in found) and all(each.ok for each in answers)
    if arguments.json:
        answered = {"answers": [each.as_dict() for each in answers]} if answers else {}
        _print_json({"plans": [each.as_dict() for each in found], **answered, "ok": ok})
    else:
        texts = [*(each.as_text() for each in found), *(each.as_text() for each in answers)]
        print("\n\n".join(texts) or "no patches are installed")
    return 0 if ok else 1


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
