"""What is fingerprinted: the upstream names that patches name, how they are read, and what has changed between two.

A fingerprint is text: the signature for people, and a hash over the normalised syntax tree. Comments, docstrings,
formatting and the annotations of functions are not in it; nothing of the upstream code is.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from vllm_compat.patches import worker
from vllm_compat.registry import Patch, Rebind, Shape
from vllm_compat.source import Source

CONSUMER, RUNTIME = "speculators", "vllm"
ABSENT = "absent"
Locate = Callable[[str], "Source | None"]
Name = tuple[str, str]  # module, symbol


def consumer_names(patches: Iterable[Patch], release: Version) -> dict[Name, list[tuple[str, Shape | None]]]:
    """What patches name in the consumer: their bindings and their shapes, with the patch that does."""
    found = _shapes(patches, CONSUMER, release)
    for patch in patches:
        for target in patch.targets:
            if isinstance(target, Rebind):
                found.setdefault((target.module, target.name), []).append((patch.id, None))
    return found


def upstream_names(
    package: str, patches: Iterable[Patch], release: Version, bindings: Mapping[str, Sequence[str]]
) -> dict[Name, list[tuple[str, Shape | None]]]:
    """What patches name in another package: their shapes and imports, and what the consumer's bindings are bound to.

    `bindings`: the fingerprints of the consumer's names ("module.name"), which say where an import comes from.
    """
    found = _shapes(patches, package, release)
    for patch in patches:
        for name in _imports(patch, package):
            found.setdefault(name, []).append((patch.id, None))
        for target in patch.targets:
            for text in bindings.get(str(target), ()) if isinstance(target, Rebind) else ():
                origin, _, name = text.removeprefix("from ").partition(" import ")
                if name and origin.partition(".")[0] == package == RUNTIME:
                    found.setdefault((origin, name), []).append((patch.id, None))
    return found


def _shapes(patches: Iterable[Patch], package: str, release: Version) -> dict[Name, list[tuple[str, Shape | None]]]:
    found: dict[Name, list[tuple[str, Shape | None]]] = {}
    for patch in patches:
        for shape in patch.shapes:
            if shape.package == package and shape.is_asked(release):
                found.setdefault((shape.module, shape.symbol), []).append((patch.id, shape))
    return found


def _imports(patch: Patch, package: str) -> list[Name]:
    """What the modules of a patch import from a package, also where only some releases have it."""
    makers = [target.make if isinstance(target, Rebind) else target.do for target in patch.targets]
    modules = {maker.__module__ for maker in makers}
    if patch.id == "capture":  # the patch whose code is the worker's
        modules |= {f"{worker.__name__}.{each.name}" for each in pkgutil.iter_modules(worker.__path__)}
    found = []
    for module in sorted(modules):
        spec = importlib.util.find_spec(module)
        source = Path(str(spec.origin if spec else None)).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
                found += [(str(node.module), alias.name) for alias in node.names]
    return found


def definition(locate: Locate, module: str, symbol: str) -> ast.AST | None:
    """What binds a name; within one package an import is followed to where the name is made."""
    for _ in range(5):
        source = locate(module)
        node = None if source is None else source.find(symbol, whole=True)
        if not isinstance(node, ast.ImportFrom) or source is None or "." in symbol:
            return node
        origin = _origin(node, module, is_package=source.path.name == "__init__.py")
        if origin.partition(".")[0] != module.partition(".")[0]:
            return node
        module, symbol = origin, _imported(node, symbol)
    raise RuntimeError(f"{module}.{symbol} is imported from one module to the next, and on")


def _origin(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)


def fingerprint(locate: Locate, module: str, symbol: str) -> str:
    """One line. Of an import it says from where, of anything else the hash and the signature.

    Absent is what no statement binds, also where a module's `__getattr__` makes it when it is asked for.
    """
    node = definition(locate, module, symbol)
    if node is None:
        return "a module" if locate(f"{module}.{symbol}") is not None else ABSENT
    if isinstance(node, ast.ImportFrom):
        return f"from {'.' * node.level}{node.module or ''} import {_imported(node, symbol)}"
    if isinstance(node, ast.Import):
        return f"import {_imported(node, symbol)}"
    node = normalised(node)
    digest = hashlib.sha256(_dump(node).encode()).hexdigest()[:12]
    return f"{digest} {signature(node)}"


def signature(node: ast.AST) -> str:
    """The header of a function or class, without its body; the names of an assignment."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})"
    return f"{type(node).__name__} {', '.join(part.id for part in ast.walk(node) if isinstance(part, ast.Name))}"


def readable(node: ast.AST | None) -> list[str]:
    """Lines to compare, for people."""
    return [] if node is None else ast.unparse(normalised(node)).splitlines()


def difference(old: ast.AST | None, new: ast.AST | None, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(readable(old), readable(new), old_name, new_name, lineterm="", n=2)
    return "\n".join(lines)


def normalised(node: ast.AST) -> ast.AST:
    """Of a function what it does; of a class its bases and fields: methods that matter are named themselves."""
    node = ast.parse(ast.unparse(node)).body[0]  # a copy: sources are read once and shared
    if isinstance(node, ast.ClassDef):
        node.body = [each for each in node.body if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            part.returns = None
            arguments = part.args
            for each in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *filter(None, (arguments.vararg, arguments.kwarg)),
            ):
                each.annotation = None
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            part.body = [each for each in part.body if not _is_text(each)] or [ast.Pass()]
    return node


def _is_text(node: ast.stmt) -> bool:
    """A docstring, of a function, a class or (as vLLM's configurations have them) a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dump(node: object) -> str:
    """As ast.dump, but the same from every Python: fields that are empty are left out, whoever added them."""
    if isinstance(node, ast.AST):
        inner = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [], ())]
        parts = [f"{name}={_dump(value)}" for name, value in inner if name not in ("ctx", "kind", "type_comment")]
        return f"{type(node).__name__}({', '.join(parts)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    return repr(node)
