"""Looks up definitions in source files that are too large to parse whole each time.

A block of source (a file, a class body) is cut into statements by indentation. Definitions are set aside
under their names and only the wanted one is parsed, and of a function only its header. Cutting is a guess, so
whoever does not like a quick answer asks again with `whole=True`, which parses the file as Python does.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

_KEYWORDS = ("def ", "class ", "async def ")
_NO_START = " \t#)]}\r\n\f"  # a line that begins so continues the statement before it


class Sources:
    """Finds the source of modules in `path` (site-packages folders), by default where imports come from.

    Nothing is imported. Each file is read once, so use one object for one plan.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._roots: dict[str, list[str]] = {}
        self._sources: dict[str, Source | None] = {}

    def __call__(self, module: str) -> Source | None:
        if module not in self._sources:
            self._sources[module] = self._read(module)
        return self._sources[module]

    def _read(self, module: str) -> Source | None:
        for root in self.roots(module.partition(".")[0]):
            base = Path(root, *module.split(".")[1:])
            for file in (base / "__init__.py", base.with_name(base.name + ".py")):
                with suppress(OSError, UnicodeDecodeError):
                    return Source(file, file.read_text(encoding="utf-8"))
        return None

    def roots(self, top: str) -> list[str]:
        """The folders of a top-level package (of a lone module: its path without `.py`), or []."""
        if top not in self._roots:
            self._roots[top] = self._find(top)
        return self._roots[top]

    def _find(self, top: str) -> list[str]:
        spec = importlib.machinery.PathFinder.find_spec(top, self._path)
        if self._path is None and (spec is None or spec.origin is None):
            # An editable install may be known to a finder of its own. For a top-level name this imports
            # nothing; ValueError means a module without a spec.
            with suppress(ValueError):
                spec = importlib.util.find_spec(top) or spec
        if spec is None:
            return []
        if spec.submodule_search_locations is not None:
            return list(spec.submodule_search_locations)
        return [spec.origin.removesuffix(".py")] if spec.origin else []


class Source:
    """The text of one file."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._text = text

    def find(self, symbol: str, *, whole: bool = False) -> ast.AST | None:
        """What binds `symbol` ("name", "Class.name"), or None. Of a function the body is not always there.

        A class's body binds every name that it binds in the source. SyntaxError if the file does not parse.
        """
        if whole:
            return _walk(self._tree, symbol.split("."))
        try:
            return self._module.find(symbol.split("."))
        except SyntaxError:
            return None

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self._text)

    @cached_property
    def _module(self) -> _Block:
        return _Block(self._text.splitlines(keepends=True))


class _Block:
    """The statements of a file or of a class body, cut apart."""

    def __init__(self, lines: list[str]) -> None:
        first = next((line for line in lines if line.lstrip()[:1] not in _NO_START), "")
        self._indent = first[: len(first) - len(first.lstrip())]
        self._definitions: dict[str, list[str]] = {}  # name -> lines; the last one wins, as in Python
        self._loose: list[str] = []  # all other statements
        self._inner: dict[str, _Block] = {}
        starts = list(self._starts(lines))
        for begin, end in zip(starts, [*starts[1:], len(lines)], strict=False):
            line = lines[begin][len(self._indent) :]
            if line.startswith(_KEYWORDS):
                name = line.partition("def " if "def " in line[:10] else "class ")[2]
                self._definitions[_identifier(name)] = lines[begin:end]
            elif not line.startswith("@"):
                self._loose += lines[begin:end]

    def _starts(self, lines: list[str]) -> Iterator[int]:
        """Numbers of the lines on which a statement of this block begins."""
        indent, column = self._indent, len(self._indent)
        quoted = ""  # the delimiter of the triple-quoted string that the line begins in
        for number, line in enumerate(lines):
            if line[column : column + 1] not in _NO_START and line[:column] == indent and not quoted:
                yield number
            if '"""' in line or "'''" in line:
                for quote in ('"""', "'''"):
                    if quoted in ("", quote) and line.count(quote) % 2:
                        quoted = "" if quoted else quote

    def find(self, path: Sequence[str]) -> ast.AST | None:
        name, *rest = path
        lines = self._definitions.get(name)
        if lines is None:
            return _walk(self._outline, path)
        if rest:
            return self._body(name).find(rest)
        return _parse([*lines[: _header(lines)], *self._body(name).outline], self._indent).body[0]

    def _body(self, name: str) -> _Block:
        if name not in self._inner:
            lines = self._definitions[name]
            is_class = lines[0].lstrip().startswith("class ")
            self._inner[name] = _Block(lines[_header(lines) :] if is_class else [])
        return self._inner[name]

    @property
    def outline(self) -> list[str]:
        """Lines that bind the same names as the block, without what is inside the definitions."""
        stubs = [f"{self._indent}def {name}(): ...\n" for name in self._definitions]
        return [*self._loose, *stubs]

    @cached_property
    def _outline(self) -> ast.Module | ast.ClassDef:
        return _parse(self.outline, self._indent)


def _identifier(text: str) -> str:
    end = next((at for at, char in enumerate(text) if not (char.isalnum() or char == "_")), len(text))
    return text[:end]


def _header(lines: list[str]) -> int:
    """How many lines the header of a definition takes: up to the colon that makes it parse."""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    for number, line in enumerate(lines, start=1):
        if line.partition("#")[0].rstrip().endswith(":"):
            with suppress(SyntaxError):
                _parse(lines[:number], indent)
                return number
    return len(lines)


def _parse(lines: list[str], indent: str) -> ast.Module | ast.ClassDef:
    """Parses statements at `indent`; a definition at the end may lack its body."""
    text = "".join(lines)
    if text.rstrip().endswith(":") or not text.strip():
        text += f"{indent} ...\n"
    if not indent:
        return ast.parse(text)
    wrapper = ast.parse("class _:\n" + text).body[0]
    assert isinstance(wrapper, ast.ClassDef)
    return wrapper


def _walk(node: ast.AST | None, path: Sequence[str]) -> ast.AST | None:
    for name in path:
        if not isinstance(node, ast.Module | ast.ClassDef):
            return None
        node = bindings(node.body).get(name)
    return node


def bindings(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Name -> what binds it, for statements of a module or class; branches of `if` and `try` count.

    What only a type checker sees (`if TYPE_CHECKING:`) does not: it is not there at run time.
    """
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found[part.id] = node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found.update(bindings(node.orelse))
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, block, []):
                    found.update(bindings(inner.body if isinstance(inner, ast.ExceptHandler) else [inner]))
    return found
