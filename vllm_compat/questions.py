"""What a user asks a patch set about something of their own (`vllm-compat plan --NAME VALUE`).

The engine knows neither the questions nor the answers: a patch set brings both (`registry.Question`). Imports neither
consumer nor runtime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_compat.decisions import Plan, columns
from vllm_compat.registry import Answer, PatchSet, Surroundings


@dataclass(frozen=True, kw_only=True)
class Answered:
    patch_set: str
    question: str
    given: str
    answer: Answer

    @property
    def ok(self) -> bool:
        return not any(finding.status == "problem" for finding in self.answer.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "set": self.patch_set,
            "question": self.question,
            "given": self.given,
            "ok": self.ok,
            "facts": dict(self.answer.facts),
            "findings": [asdict(finding) for finding in self.answer.findings],
        }

    def as_text(self) -> str:
        facts = [
            (name.replace("_", " "), _text(value)) for name, value in self.answer.facts.items() if value is not None
        ]
        lines = [f"{self.question} {self.given}:"]
        lines += [columns(facts)] if facts else []
        for finding in self.answer.findings:
            lines += [f"  {finding.status}: {finding.text}", *([f"    {finding.advice}"] if finding.advice else [])]
        return "\n".join(lines).encode(errors="backslashreplace").decode()  # half a surrogate pair has no UTF-8


def ask(
    sets: Iterable[PatchSet], plans: Iterable[Plan], target: Path | None, asked: Mapping[str, str]
) -> Iterator[Answered]:
    """Put every question that was `asked` (name to value) to the sets that have it."""
    for patch_set, plan in zip(sets, plans, strict=True):
        for question in patch_set.questions:
            if (given := asked.get(question.name)) is not None:
                here = surroundings(plan, target, {question.name: given})
                answer = question.answer(here)
                yield Answered(patch_set=patch_set.name, question=question.name, given=given, answer=answer)


def surroundings(plan: Plan, target: Path | None, options: Mapping[str, Any]) -> Surroundings:
    """What checks and answers may look at."""
    versions = {each.module: each.version for each in plan.packages}
    path = tuple(sys.path) if target is None else (str(target),)
    return Surroundings(environ=os.environ, versions=versions, options=options, path=path)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
