"""The environment's switches, read when they matter (when the consumer is imported), not before.

- VLLM_COMPAT=0: off, nothing is patched
- VLLM_COMPAT_DISABLE=a,b: leave these patches out
- VLLM_COMPAT_STRICT=1: anything skipped, unknown or untested is an error
- VLLM_COMPAT_LOG=debug|info|warning|error: what is said on stderr
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_FALSE = ("0", "false", "no", "off")


class Switches:
    """A plain class: importing `dataclasses` would cost as much as all of `import vllm_compat` may."""

    __slots__ = ("disabled", "log", "off", "strict")

    def __init__(
        self, *, off: bool = False, disabled: tuple[str, ...] = (), strict: bool = False, log: str = ""
    ) -> None:
        self.off, self.disabled, self.strict, self.log = off, disabled, strict, log


def read(environ: Mapping[str, str] | None = None) -> Switches:
    """The switches as they are now."""
    env = os.environ if environ is None else environ
    strict = env.get("VLLM_COMPAT_STRICT", "").strip().lower()
    disabled = (part.strip() for part in env.get("VLLM_COMPAT_DISABLE", "").split(","))
    return Switches(
        off=env.get("VLLM_COMPAT", "").strip().lower() in _FALSE,
        disabled=tuple(part for part in disabled if part),
        strict=bool(strict) and strict not in _FALSE,
        log=env.get("VLLM_COMPAT_LOG", "").strip().lower(),
    )
