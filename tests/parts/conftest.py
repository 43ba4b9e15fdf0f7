"""For the tests of `extract` without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_compat.extraction.settings import Settings

sys.path.append(str(Path(__file__).parent))  # test modules, and the processes of replicas, import `fakes`


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    import fakes

    from vllm_compat.extraction import devices

    monkeypatch.setattr(devices, "visible", lambda: (None, []))
    return fakes.settings_of(tmp_path, monkeypatch)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is in this process: it starts at once, and a kill takes it along."""
    import fakes

    from vllm_compat.extraction import processes

    monkeypatch.setattr(processes, "ProcessReplica", fakes.InProcess)
