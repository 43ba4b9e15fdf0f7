"""The shape gate: does the installed source look the way a patch expects it to?

Read with `ast`, never by import. A quick look at the wanted piece usually says yes; a no is always checked
again on the whole file (source.py), so that a mismatch is the source's and not the quick look's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from vllm_compat.registry import Shape
from vllm_compat.source import Source, bindings

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mismatch:
    """A shape that does not fit, in words for people."""

    shape: Shape
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.shape.module}.{self.shape.symbol}: expected {self.expected}, found {self.found}"


def check(shape: Shape, locate: Callable[[str], Source | None]) -> Mismatch | None:
    """None if the shape fits, else what was expected and what was found. `locate` is a `source.Sources`."""
    source = locate(shape.module)
    if source is None:
        return Mismatch(shape, f"a module {shape.module}", "no source file of that name")
    if _found(shape, source.find(shape.symbol)) is None:
        return None
    try:
        found = _found(shape, source.find(shape.symbol, whole=True))
    except SyntaxError as error:
        found = f"a file that this Python cannot parse ({source.path}: {error})"
    return Mismatch(shape, _expected(shape), found) if found else None


def _expected(shape: Shape) -> str:
    if shape.parameters or shape.absent:
        parts = [f"with {', '.join(shape.parameters)}"] if shape.parameters else []
        parts += [f"without {', '.join(shape.absent)}"] if shape.absent else []
        return f"a function {' and '.join(parts)}"
    return f"a class with {', '.join(shape.fields)}" if shape.fields else "that name"


def _found(shape: Shape, node: ast.AST | None) -> str | None:
    """None if `node` is what the shape says, else what it is instead."""
    if node is None:
        return "nothing"
    if shape.parameters or shape.absent:
        if not isinstance(node, _FUNCTION):
            return _kind(node)
        names = _parameters(node.args)
        fits = set(shape.parameters) <= set(names) and not set(shape.absent) & set(names)
        return None if fits else f"a function ({', '.join(names)})"
    if shape.fields:
        if not isinstance(node, ast.ClassDef):
            return _kind(node)
        there = bindings(node.body)
        missing = [name for name in shape.fields if name not in there]
        return f"a class without {', '.join(missing)}" if missing else None
    return None


def _parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in (*named, arguments.vararg, arguments.kwarg) if each is not None]


def _kind(node: ast.AST) -> str:
    if isinstance(node, _FUNCTION):
        return "a function"
    if isinstance(node, ast.ClassDef):
        return "a class"
    return "an import" if isinstance(node, ast.Import | ast.ImportFrom) else "an assignment"
