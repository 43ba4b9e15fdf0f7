"""`pytest tests/gpu --tp N`: the same tests with N-way tensor parallelism, on N CUDA devices."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tp", type=int, default=1, help="tensor parallel size (number of GPUs) of the GPU tests")


@pytest.fixture(scope="session")
def tp(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--tp"))
