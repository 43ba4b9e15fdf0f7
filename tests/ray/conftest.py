"""A local Ray cluster of two nodes with one core each: no node can hold two replicas."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PARTS = str(Path(__file__).resolve().parents[1] / "parts")
sys.path.append(PARTS)  # `fakes`


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PARTS, os.environ.get("PYTHONPATH")])))
        # Ray's workers search the driver's folder, too: in a checkout they would find the source tree.
        patch.chdir(tmp_path_factory.mktemp("driver"))
        # Many short steps: the tiny model is else done before the second replica has loaded.
        patch.setenv("VLLM_COMPAT_STEP_TOKENS", "32")
        nodes = _start(attempts=3)
        yield str(nodes.address)
        ray.shutdown()
        nodes.shutdown()


def _start(attempts: int) -> Any:
    """Ray gives a node 30 seconds to start, which a busy machine may not keep."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    try:
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        nodes.add_node(**node)
    except Exception:
        if attempts == 1:
            raise
        return _start(attempts - 1)
    return nodes
