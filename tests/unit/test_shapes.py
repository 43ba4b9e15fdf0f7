"""The shape gate on awkward source. A quick look may be wrong; the answer may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_compat.registry import Shape
from vllm_compat.shapes import check
from vllm_compat.source import Sources

SOURCE = '''
"""Docs with unindented text.

def hidden(wrong): pass
class Hidden: pass
"""
from __future__ import annotations
import os.path as ospath, json.decoder
from typing import TYPE_CHECKING, (
    Any as Anything,
)
if TYPE_CHECKING:
    from somewhere import OnlyForTypes
try:
    from fast import helper
except ImportError:
    def helper(slow): ...
if ospath:
    class Chosen:
        def method(self, chosen): ...
A, (B, *C) = 1, (2, 3)
A.attribute = D[0] = 5
typed: int = 3

def plain(
    first: dict[str, int] = {"a": 1},  # with a comment:
    /, second=lambda: {
        "x": 1
    },
    *rest, keyword: int,
    **more,
) -> None:
    """Text with
def fake(): pass
    inside."""

def one_line(x): return x

@decorator(
    "x",
)
async def decorated(request): ...

class Empty: pass

class Big(
    object,
):
    """Doc.

    def method(self, from_doc): ...
    """
# a comment in the first column
    field: int
    other = 3
    if True:
        conditional = 1

    def method(self, real, *, option=None):
        def inner(hidden): ...

    @property
    def prop(self): return 1

    async def waits(self, it): ...

    class Inner:
        def deep(self, down): ...

def redefined(old): ...
def redefined(new): ...
'''.replace(
    "from typing import TYPE_CHECKING, (\n    Any as Anything,\n)",
    "from typing import (\n    TYPE_CHECKING,\n    Any as Anything,\n)",
)


@pytest.fixture
def locate(tmp_path: Path) -> Sources:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pkg" / "sub" / "__init__.py").write_text("here = 1")
    (tmp_path / "pkg" / "mod.py").write_text(SOURCE)
    (tmp_path / "pkg" / "broken.py").write_text("def good(a): ...\nx = (\n")
    (tmp_path / "pkg" / "latin.py").write_bytes(b"caf\xe9 = 1")
    (tmp_path / "lone.py").write_text("value = 1")
    return Sources([str(tmp_path)])


FITS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in ("ospath", "json", "Anything", "helper", "A", "B", "C", "typed", "Empty", "Chosen")],
    ("plain", {"parameters": ("first", "second", "rest", "keyword", "more"), "absent": ("x",)}),
    ("one_line", {"parameters": ("x",)}),
    ("decorated", {"parameters": ("request",)}),
    ("Big", {"fields": ("field", "other", "conditional", "method", "prop", "waits", "Inner")}),
    ("Big.method", {"parameters": ("self", "real", "option"), "absent": ("from_doc", "hidden")}),
    ("Big.waits", {"parameters": ("it",)}),
    ("Big.prop", {}),
    ("Big.field", {}),
    ("Big.conditional", {}),
    ("Big.Inner.deep", {"parameters": ("down",)}),
    ("Chosen.method", {"parameters": ("chosen",)}),
    ("helper", {"parameters": ("slow",)}),
    ("redefined", {"parameters": ("new",), "absent": ("old",)}),
]


@pytest.mark.parametrize(("symbol", "facts"), FITS, ids=[f"{s}-{n}" for n, (s, _) in enumerate(FITS)])
def test_fits(locate: Sources, symbol: str, facts: dict[str, Any]) -> None:
    assert check(Shape(module="pkg.mod", symbol=symbol, **facts), locate) is None


@pytest.mark.parametrize(
    ("symbol", "facts", "text"),
    [
        ("hidden", {}, "expected that name, found nothing"),
        ("Hidden", {}, "expected that name, found nothing"),
        ("fake", {}, "found nothing"),
        ("OnlyForTypes", {}, "found nothing"),
        ("D", {}, "found nothing"),
        ("Big.inner", {}, "found nothing"),
        ("Big.nothing", {}, "found nothing"),
        ("Nothing.method", {}, "found nothing"),
        ("one_line.x", {}, "found nothing"),
        ("one_line", {"parameters": ("x", "y")}, "expected a function with x, y, found a function (x)"),
        ("one_line", {"absent": ("x",)}, "expected a function without x, found a function (x)"),
        ("Empty", {"fields": ("a",)}, "expected a class with a, found a class without a"),
        ("Big", {"fields": ("field", "inner", "real")}, "found a class without inner, real"),
        ("Big", {"parameters": ("a",)}, "found a class"),
        ("typed", {"parameters": ("a",)}, "found an assignment"),
        ("json", {"fields": ("a",)}, "found an import"),
        ("plain", {"fields": ("a",)}, "found a function"),
    ],
)
def test_does_not_fit(locate: Sources, symbol: str, facts: dict[str, Any], text: str) -> None:
    found = check(Shape(module="pkg.mod", symbol=symbol, **facts), locate)
    assert found is not None
    assert str(found).startswith(f"pkg.mod.{symbol}: ")
    assert text in str(found)


def test_modules(locate: Sources) -> None:
    assert check(Shape(module="pkg.sub", symbol="here"), locate) is None
    assert check(Shape(module="lone", symbol="value"), locate) is None
    for module in ("pkg.none", "none", "none.sub", "pkg.mod.sub", "pkg.latin"):
        found = check(Shape(module=module, symbol="x"), locate)
        assert found is not None
        assert found.found == "no source file of that name"


def test_unparsable_file(locate: Sources) -> None:
    assert check(Shape(module="pkg.broken", symbol="good", parameters=("a",)), locate) is None
    found = check(Shape(module="pkg.broken", symbol="x"), locate)
    assert found is not None
    assert "cannot parse" in found.found


def test_each_file_is_read_once(locate: Sources) -> None:
    assert locate("pkg.mod") is locate("pkg.mod")


def test_own_environment() -> None:
    assert check(Shape(module="vllm_compat.plan", symbol="plan", parameters=("target",)), Sources()) is None
