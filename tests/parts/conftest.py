"""For the tests of `extract` and `verify` without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_compat.extraction.settings import Settings

# Test modules, and the processes of replicas, import `fakes` and `sample_files`.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models that are too small for more: threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
