"""What a plan is made of: what was found, what was decided for each patch, and how that reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Found:
    """A package as installed. `status`: ok, not-proven, newer, unsupported, unreadable or missing."""

    module: str
    distributions: tuple[str, ...]
    version: str | None
    release: str | None
    supported: str
    status: str
    problem: str | None = None


@dataclass(frozen=True)
class Decision:
    """`status`: apply, not-needed (other release), disabled, misfit (shape), blocked (needs another)."""

    patch_id: str
    status: str
    reason: str
    details: tuple[str, ...] = ()  # misfit: one line for each shape


@dataclass(frozen=True, kw_only=True)
class Plan:
    name: str
    packages: tuple[Found, ...]
    decisions: tuple[Decision, ...]  # in the order in which the patches apply
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def applies(self) -> tuple[str, ...]:
        """Ids of the patches to apply, in order."""
        return tuple(each.patch_id for each in self.decisions if each.status == "apply")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. `schema` changes when the meaning of a field does."""
        return {**asdict(self), "ok": self.ok}

    def headline(self) -> str:
        """`consumer 1.2 on runtime 3.4: 11 patches apply, 1 not needed`."""
        first, *others = [f"{each.module} {each.version or 'missing'}" for each in self.packages]
        counts = dict.fromkeys(("apply", "not-needed", "disabled", "misfit", "blocked"), 0)
        for each in self.decisions:
            counts[each.status] += 1
        words = [f"{count} {status.replace('-', ' ')}" for status, count in counts.items() if count]
        words[:1] = [f"{counts['apply']} patches apply"] if counts["apply"] else words[:1]
        return f"{first}{' on ' + others[0] if others else ''}: {', '.join(words) or 'no patches'}"

    def table(self) -> str:
        """What was found and what is supported."""
        rows = [("package", "found", "supported", "")]
        rows += [(each.module, each.version or "-", each.supported or "any", each.status) for each in self.packages]
        return columns(rows)

    def as_text(self) -> str:
        """The plan for people."""
        rows = [(each.status, each.patch_id, each.reason) for each in self.decisions]
        parts = [self.headline(), self.table(), columns(rows)]
        parts += [f"problem: {text}" for text in self.problems]
        parts += [f"warning: {text}" for text in self.warnings]
        return "\n".join(part for part in parts if part)


def columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)
