"""Each patch is needed (switched off alone, a run that is right with all of them fails, by its own symptom), and each
notices when the source it builds on has moved."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_compat.patches import SPECULATORS
from vllm_compat.plan import plan
from vllm_compat.registry import Patch, Shape

ALL = {patch.id for patch in SPECULATORS.patches}
# Those for the releases that are installed here; the others have their turn in another environment.
PATCHES = {patch.id: patch for patch in SPECULATORS.patches if patch.id in plan().applies}

# speculators 0.4 does by itself what these do for the probe's plain model; hybrid models and newer releases need them.
UNSEEN = {"scheduler-construction", "kv-cache-planning", "two-phase-execution"} & set(PATCHES)
if "reply-by-request" not in PATCHES:
    UNSEEN.clear()
# From 0.34 on a CPU without Triton has a runner that takes positions from the scheduler, whether or not it has sampled.
VLLM = Version(metadata.version("vllm"))
if VLLM.release >= (0, 34) and VLLM.local == "cpu":
    UNSEEN.add("two-phase-execution")

# Of each patch; where it depends on the release, from old to new.
SYMPTOMS = {
    "transformers-5": "PydanticUndefinedAnnotation: name 'torch' is not defined",
    "transformers-5-masks": "No module named 'transformers.modeling_attn_mask_utils'",
    "call-boundary": "needs call-boundary",
    "tokenizer": "custom code which must be executed to correctly load",
    "engine-configuration": r"a step has 8192 tokens|is_encoder_decoder\n\s+Field required",
    "scheduler-construction": "missing 1 required positional argument: 'block_size'",
    "scheduler-block-sizes": "missing 1 required positional argument: 'block_size'",
    "prefill-bookkeeping": r"prompt \d+ \(request \w+\): expected 138 rows, got \d+",
    "request-construction": "cache_full_blocks|unexpected keyword argument 'eos_token_id'|a prefix cache was read",
    "model": "the model began to load",
    "capture": "needs capture",
    "workers": "0 proven workers",
    "devices": "Torch not compiled with CUDA enabled|Found no NVIDIA driver|no NVIDIA GPU",
    "kv-cache-planning": "unexpected keyword argument 'kv_cache_specs'",
    "kv-cache-planning-moved": "cannot import name '_get_kv_cache_groups_uniform_spec'",
    "kv-cache-layout": "KV cache layout has not been resolved yet",
    "two-phase-execution": r"must be called after execute_model.. returns None|computed row \d+ at position",
    "hand-over": "2 replies held tensors",
    "reply-shape": "Boolean value of Tensor with more than one value is ambiguous",
    "input-order": "result 2 is not that of prompt 2",
    "reply-by-request": "'list' object has no attribute",
    "accelerator-calls": "Torch not compiled with CUDA enabled|Found no NVIDIA driver|no NVIDIA GPU",
}


@pytest.fixture(scope="module")
def remote_code_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer class that comes with the folder: remote code."""
    folder = tmp_path_factory.mktemp("remote") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "TinyTokenizer", "auto_map": {"AutoTokenizer": [None, "tiny_code.TinyTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tiny_code.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class TinyTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder


def probe(model: Path, modules: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"VLLM_COMPAT_STEP_TOKENS": "64", "VLLM_COMPAT_STRICT": "0", "HF_MODULES_CACHE": str(modules)}
    return subprocess.run(
        [sys.executable, Path(__file__).with_name("probe.py"), model],
        env=os.environ | settings | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def probes(remote_code_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The probe with all patches ("") and without each one. Two at a time: most of a run is importing vLLM."""
    modules = tmp_path_factory.mktemp("modules")
    with ThreadPoolExecutor(2) as pool:
        runs = {
            patch_id: pool.submit(probe, remote_code_model, modules / (patch_id or "all"), VLLM_COMPAT_DISABLE=patch_id)
            for patch_id in ("", *PATCHES)
        }
        return {patch_id: run.result() for patch_id, run in runs.items()}


def test_every_patch_has_its_symptom() -> None:
    assert set(SYMPTOMS) == ALL


def test_with_all_patches_the_probe_is_right(probes: dict[str, Any]) -> None:
    done = probes[""]
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all right" in done.stdout


@pytest.mark.parametrize("patch_id", [patch_id for patch_id in PATCHES if patch_id not in UNSEEN])
def test_without_this_patch_the_probe_fails(patch_id: str, probes: dict[str, Any]) -> None:
    done = probes[patch_id]
    assert done.returncode != 0
    assert "all right" not in done.stdout
    assert re.search(SYMPTOMS[patch_id], done.stderr), done.stderr[-4000:]


def shapes() -> list[tuple[Patch, Shape]]:
    """Those of the installed releases."""
    releases = {each.module: Version(each.release) for each in plan().packages if each.release}
    asked = [(patch, shape) for patch in PATCHES.values() for shape in patch.shapes]
    return [(patch, shape) for patch, shape in asked if shape.is_asked(releases.get(shape.package))]


def test_every_patch_builds_on_shapes() -> None:
    assert all(patch.shapes for patch in SPECULATORS.patches)


@pytest.fixture(scope="module")
def copied_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with just the metadata and the source files that the shapes look at."""
    site = tmp_path_factory.mktemp("drift") / "site"
    for module in {shape.module for _, shape in shapes()}:
        top, _, rest = module.partition(".")
        spec = util.find_spec(top)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        source = Path(spec.submodule_search_locations[0], *rest.split(".")).with_suffix(".py")
        target = site / source.relative_to(Path(spec.submodule_search_locations[0]).parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        (site / top / "__init__.py").touch()
        target.write_bytes(source.read_bytes())
    for package in SPECULATORS.packages:
        name = next(d for d in package.distributions if any(metadata.distributions(name=d)))
        info = site / f"{name.replace('-', '_')}-{metadata.version(name)}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {metadata.version(name)}\n")
        (site / package.module).mkdir(exist_ok=True)
        (site / package.module / "__init__.py").touch()
    return site


def test_the_installed_source_has_every_shape(copied_sources: Path) -> None:
    found = plan(target=copied_sources)
    assert found.ok, found.problems
    assert set(found.applies) == set(PATCHES)


@pytest.mark.parametrize(("patch", "shape"), shapes(), ids=lambda value: getattr(value, "id", None) or value.symbol)
def test_a_moved_symbol_is_an_error_that_names_patch_and_symbol(
    patch: Patch, shape: Shape, copied_sources: Path
) -> None:
    """Rename what the patch builds on: its last parameter or field, or the symbol itself."""
    source = copied_sources.joinpath(*shape.module.split(".")).with_suffix(".py")
    before = source.read_text()
    name = (shape.parameters + shape.fields or tuple(shape.symbol.split(".")))[-1]
    source.write_text(re.sub(rf"\b{name}\b", f"{name}_moved", before))
    try:
        found = plan(target=copied_sources)
    finally:
        source.write_text(before)
    assert not found.ok
    (decision,) = [each for each in found.decisions if each.patch_id == patch.id]
    assert decision.status in ("misfit", "blocked")
    said = "\n".join(found.problems)
    assert patch.id in said
    assert shape.symbol.split(".")[-1] in said
