"""The plan: the one answer to "which patches apply here, and why not the others", for preview and for action.

This module is the light door to it (`vllm_compat.plan` is this function, so it is loaded with the package);
the work is done in `judge.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    from vllm_compat.decisions import Plan
    from vllm_compat.switches import Switches


def plan(
    name: str | None = None, *, target: str | os.PathLike[str] | None = None, switches: Switches | None = None
) -> Plan:
    """The plan of the patch set `name`, or of the only one that is installed.

    `target` is a site-packages folder to judge instead of this process's own environment; `switches` defaults
    to the environment's. Imports neither consumer nor runtime. Raises PlanError when there is no such patch
    set or its records are wrong; everything found wrong about the installation is in `Plan.problems` instead.
    """
    from vllm_compat.errors import PlanError

    every = plans(target=target, switches=switches)
    chosen = [each for each in every if name in (None, each.name)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(each.name for each in every) or "none"
    raise PlanError(f"which patches? {name or 'no name'} was given, installed are: {there}")


def plans(*, target: str | os.PathLike[str] | None = None, switches: Switches | None = None) -> tuple[Plan, ...]:
    """The plans of all installed patch sets."""
    from vllm_compat.judge import decide
    from vllm_compat.registry import discover

    sets = discover()
    ids = tuple(patch.id for each in sets for patch in each.patches)
    return tuple(decide(each, target=target, switches=switches, known=ids) for each in sets)
