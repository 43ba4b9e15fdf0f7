"""One extraction that needs every patch: run by `test_patches.py` in its own process, with one of them switched off.

A tokenizer with remote code, 34 prompts (two more than v0.3.0 lets run at once) cut at a small step budget, shared
prefixes over two calls with the prefix cache on, rows against the reference, proven workers, no tensor in a reply,
and a model that is refused.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(model: Path) -> None:
    import torch
    from speculators.data_generation import vllm_hidden_states_generator as module

    import vllm_compat
    from vllm_compat.extraction import kernels
    from vllm_compat.extraction.compare import compare
    from vllm_compat.extraction.reference import reference_states

    cache_config = module.CacheConfig

    def cache_switched_on(**settings: Any) -> Any:
        config = cache_config(**settings)
        config.enable_prefix_caching = True
        return config

    statuses = {decision.patch_id: decision.status for decision in vllm_compat.plan().decisions}
    if statuses["request-construction"] != "not-needed":  # this release's requests can be given what the cache wants
        module.CacheConfig = cache_switched_on
    layer_ids = [1, 3]
    generator = module.VllmHiddenStatesGenerator(str(model), layer_ids=layer_ids, max_model_len=256)
    budget = generator.vllm_config.scheduler_config.max_num_batched_tokens
    assert budget == int(os.environ["VLLM_COMPAT_STEP_TOKENS"]), f"a step has {budget} tokens"
    tensors_in_replies = listen(generator.executor)
    shared = list(range(10, 58))
    prompts = [shared + list(range(start, start + 90)) for start in range(100, 331, 7)]
    want = reference_states(model, prompts, layer_ids, dtype=torch.bfloat16)
    for _ in range(2):
        got = [result["hidden_states"] for result in generator.generate(prompts)]
        report = compare(got, want, layer_ids=layer_ids, prompts=prompts, cut=kernels.cut())
        assert report.ok, f"wrong rows:\n{report.as_text()}"
    workers = vllm_compat.status()["workers"]
    assert len(workers) == 1, f"{len(workers)} proven workers"
    assert not tensors_in_replies, f"{len(tensors_in_replies)} replies held tensors"
    check_refusal(model)
    print("all right")


def check_refusal(model: Path) -> None:
    """A model whose layers return what must not be added, and no weights: refused before anybody looks for them."""
    from speculators.data_generation import VllmHiddenStatesGenerator
    from transformers import CohereConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        CohereConfig(vocab_size=512, architectures=["CohereForCausalLM"], **sizes).save_pretrained(folder)
        try:
            VllmHiddenStatesGenerator(folder, layer_ids=[1], max_model_len=256)
        except Exception as error:  # noqa: BLE001 - told by its text
            said = str(error)
        else:
            said = "no error"
    if "Nothing has been loaded" not in said:
        raise AssertionError(f"the model began to load: {said}")


def listen(executor: Any) -> list[Any]:
    """Collects the replies of rank 0 that hold tensors."""
    import torch

    queue, found = executor.workers[0].worker_response_mq, []
    dequeue = queue.dequeue

    def listening(*args: Any, **kwargs: Any) -> Any:
        status, reply = dequeue(*args, **kwargs)
        if isinstance(reply, list) and any(isinstance(part, torch.Tensor) for part in reply):
            found.append(reply)
        return status, reply

    queue.dequeue = listening
    return found


if __name__ == "__main__":
    import vllm_compat  # noqa: F401 - before the consumer

    main(Path(sys.argv[1]))
