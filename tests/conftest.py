"""For the tests with a real vLLM: tiny random models, a generator of the unmodified consumer, and a Hugging Face
forward pass of each prompt alone to compare with.

The tests do not ask which device there is: those of `tests/live` run on the CPU build and on a GPU alike.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .evidence import Evidence

LAYERS = 6
# Of the CPU build, whose workers bind their threads to cores unless told not to: 0.11.0 does not know the word, 0.20
# stops with an IndexError (vllm/utils/ompmultiprocessing.py).
UNKNOWN_NOBIND = ("0.11.0", "0.20.0", "0.20.1", "0.20.2")
FIRST_PLAIN_TOKEN = 3  # the special tokens come first in the tiny vocabulary


evidence_key = pytest.StashKey[Evidence]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--evidence", metavar="DIR", help="write a record of what the live tests have compared")
    parser.addoption("--tp", type=int, default=1, help="tensor parallel size (devices) of tests that name none")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[evidence_key] = Evidence(config.getoption("evidence"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    evidence = session.config.stash[evidence_key]
    if evidence.folder is not None:
        print()
        if exitstatus == 0:
            print("\n".join(f"evidence: {file.name}" for file in evidence.write()) or "evidence: nothing was compared")
        else:
            print("evidence: none of a run that failed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("live", "gpu"):
            item.add_marker(item.path.parent.name)


@pytest.fixture(scope="session")
def active() -> None:
    """vLLM's settings, each only where the user has not chosen, and vllm_compat before the consumer."""
    import vllm_compat

    (release,) = (package.release for package in vllm_compat.plan().packages if package.module == "vllm")
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if release not in UNKNOWN_NOBIND:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_COMPAT_STRICT", "1")
    vllm_compat.activate()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, active: None) -> Path:
    """A tiny bfloat16 Llama with its tokenizer."""
    from vllm_compat.extraction.tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model(folder, layers=LAYERS, max_len=4096, dtype="bfloat16")
    make_tokenizer(folder)
    return folder


class Extraction:
    """A generator of the unmodified consumer, and the independent reference of its model."""

    def __init__(self, evidence: Evidence, model: Path, layer_ids: list[int], **settings: Any) -> None:
        from speculators.data_generation import VllmHiddenStatesGenerator

        self._evidence = evidence
        self.model = model
        self.generator = VllmHiddenStatesGenerator(str(model), layer_ids=layer_ids, **settings)
        self.layer_ids = sorted(set(layer_ids))

    def generate(self, prompts: Any) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self.generator.generate(prompts)
        return results

    def check(self, prompts: list[list[int]], results: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Generate (unless done) and compare row by row with each prompt's own forward pass."""
        import torch

        from vllm_compat.extraction import kernels
        from vllm_compat.extraction.compare import compare
        from vllm_compat.extraction.reference import reference_states

        if results is None:
            results = self.generate(prompts)
        longest = self.generator.vllm_config.model_config.max_model_len - 1
        prompts = [prompt[:longest] for prompt in prompts]
        want = reference_states(self.model, prompts, self.layer_ids, dtype=torch.bfloat16)
        assert [result["input_ids"].tolist() for result in results] == prompts
        got = [result["hidden_states"] for result in results]
        report = compare(got, want, layer_ids=self.layer_ids, prompts=prompts, cut=kernels.cut())
        assert report.ok, report.as_text()
        self._note(report)
        return results

    def _note(self, report: Any) -> None:
        import vllm_compat

        status = vllm_compat.status()
        config = self.generator.vllm_config
        self._evidence.add(
            report.as_dict()["layers"],
            device=device_name(),
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            dtype=str(config.model_config.dtype),
            versions={
                "python": platform.python_version(),
                "vllm_compat": str(status["version"]),
                **status["consumers"][0]["versions"],
            },
            model_runner=status["workers"][-1]["model_runner"],
            patches=[entry["patch"] for entry in status["patches"]],
        )

    def requests_in_workers(self) -> list[int]:
        """How many requests each worker still knows."""

        def known(worker: Any) -> int:
            runner = worker.model_runner  # V1, or V2
            return len(runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index)

        return self.in_worker(known)

    def in_worker(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(worker, *args)`` in every worker; nested functions travel by value."""
        replies: list[Any] = self.generator.executor.collective_rpc(function, args=args)
        return replies


@pytest.fixture(scope="session")
def evidence(pytestconfig: pytest.Config) -> Evidence:
    return pytestconfig.stash[evidence_key]


def device_name() -> str:
    """As vLLM's platform knows it (on a GPU from NVML): CUDA is not opened in this process."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name()) if current_platform.is_cuda_alike() else "cpu"


@pytest.fixture(scope="session")
def tp(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--tp"))


@pytest.fixture(scope="module")
def extract(active: None, evidence: Evidence, tp: int) -> Iterator[Callable[..., Extraction]]:
    """Build an ``Extraction``; its workers end with the module."""
    made: list[Extraction] = []

    def build(model: Path, layer_ids: list[int], **settings: Any) -> Extraction:
        # Several generators live at once on one device; v0.3.0's default is 80 % of it for each.
        default = {"gpu_memory_utilization": 0.1, "tensor_parallel_size": tp}
        made.append(Extraction(evidence, model, layer_ids, **(default | settings)))
        return made[-1]

    yield build
    for extraction in made:
        extraction.generator.executor.shutdown()


@pytest.fixture
def prompts_of() -> Callable[..., list[list[int]]]:
    """Random prompts of the given lengths; they differ from their first tokens on, so no row can stand for another."""

    def build(*lengths: int, seed: int = 0) -> list[list[int]]:
        source = random.Random(f"{lengths} {seed}")
        return [[source.randrange(FIRST_PLAIN_TOKEN, 512) for _ in range(length)] for length in lengths]

    return build
