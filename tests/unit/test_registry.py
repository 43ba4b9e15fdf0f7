"""Records: order, conflicts, and the errors that a wrong one gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_compat.errors import PlanError
from vllm_compat.registry import Package, Patch, PatchSet, Rebind, Retirement, Shape, checked


def patch(id: str, *names: str, **more: Any) -> Patch:
    values: dict[str, Any] = {
        "id": id,
        "ranges": {"user": ">=1"},
        "targets": tuple(Rebind(module="user.gen", name=name, make=lambda old: old) for name in names),
        "retires": Retirement(when="never"),
    }
    values.update(dict.fromkeys(("symptom", "cause", "does", "evidence"), "text"))
    return Patch(**{**values, **more})


def patch_set(*patches: Patch) -> PatchSet:
    user = Package(module="user", distributions=("user",), supported="")
    return PatchSet(name="user", consumer=user, runtimes=(), patches=patches)


def order(*patches: Patch) -> list[str]:
    return [each.id for each in checked(patch_set(*patches)).patches]


def test_order_is_stable_and_respects_after_and_needs() -> None:
    assert order(patch("c"), patch("a"), patch("b")) == ["c", "a", "b"]
    assert order(patch("a", after=("c",)), patch("b", needs=("a",)), patch("c")) == ["c", "a", "b"]


def test_same_binding_needs_an_order() -> None:
    assert order(patch("b", "x", after=("m",)), patch("m", after=("a",)), patch("a", "x")) == ["a", "m", "b"]
    with pytest.raises(PlanError, match=r"b and a both change user\.gen\.x: say which comes first"):
        order(patch("a", "x"), patch("b", "x"))
    with pytest.raises(PlanError, match="both change"):
        order(patch("a", "Gen"), patch("b", "Gen.generate"))
    assert order(patch("a", "Gen"), patch("b", "Generator")) == ["a", "b"]


@pytest.mark.parametrize(
    ("patches", "text"),
    [
        ([patch("a"), patch("a")], "'a' is there twice"),
        ([patch("a", "x", "x")], "a: user.gen.x is there twice"),
        ([patch("a", after=("b",))], "'b', which is no known patch"),
        ([patch("a", after=("b",)), patch("b", needs=("a",))], "wait for each other: a, b"),
        ([patch("a", ranges={"other": ""})], "range for other, which is no package"),
        ([patch("a", ranges={"user": "new"})], "no version range"),
        ([patch("a", shapes=(Shape(module="user.gen", symbol="x", releases="new"),))], "no version range"),
        (
            [patch("a", shapes=(Shape(module="other.gen", symbol="x", releases=">=1"),))],
            "releases of other, which is no",
        ),
        ([patch("a", targets=(Rebind(module="runtime.core", name="x", make=id),))], "only the consumer"),
    ],
)
def test_wrong_records(patches: list[Patch], text: str) -> None:
    with pytest.raises(PlanError, match=text.replace(".", r"\.")):
        checked(patch_set(*patches))


def test_twice_the_same_package() -> None:
    given = patch_set()
    with pytest.raises(PlanError, match="package 'user' is there twice"):
        checked(replace(given, runtimes=(given.consumer,)))
