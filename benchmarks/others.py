"""Other ways to the same rows, for ``extraction.py --others``; writes tokens per second to a file.

python benchmarks/others.py hugging_face|vllm_extractor|hand_patch MODEL SETTINGS_AS_JSON FILE
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extraction import random_prompts

Batch = list[list[int]]
# What `hand_patch` does without: the consumer's own capture and reply are left as they are.
OURS = (
    "accelerator-calls capture devices hand-over input-order kv-cache-layout kv-cache-planning "
    "kv-cache-planning-moved model prefill-bookkeeping reply-by-request tokenizer workers"
)


def hugging_face(model: str, layer_ids: list[int], longest: int, ranks: int) -> Callable[[Batch], Any]:
    """Prompts of one length need no padding; hooks keep what is asked for, and only that is copied to the host."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
    kept: list[torch.Tensor] = []
    for layer_id in layer_ids:
        network.model.layers[layer_id].register_forward_hook(
            lambda module, args, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )

    def run(batch: Batch) -> Any:
        kept.clear()
        with torch.inference_mode():
            network.model(torch.tensor(batch, device=device), use_cache=False)
            layers = [rows.cpu() for rows in kept]
        return [[rows[prompt].clone() for rows in layers] for prompt in range(len(batch))]

    return run


def vllm_extractor(model: str, layer_ids: list[int], longest: int, ranks: int) -> Callable[[Batch], Any]:
    """vLLM's own (docs/features/speculative_decoding/extract_hidden_states.md), files in /dev/shm, read back.

    Its layer numbers count layers passed, ours name the last one passed.
    """
    import safetensors.torch
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    folder = tempfile.TemporaryDirectory(dir="/dev/shm")
    network = vllm.LLM(
        model,
        tensor_parallel_size=ranks,
        max_model_len=longest + 1,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.5,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in layer_ids]}
            },
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder.name},
        },
    )
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0)
    # Later releases write while the request's reply is on its way, and have a function that waits for it.
    load = getattr(connector, "load_hidden_states", safetensors.torch.load_file)

    def run(batch: Batch, keep: Any = folder) -> Any:
        outputs = network.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False)
        results = []
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            results.append(load(path))
            for file in (path, path + ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
        return results

    return run


def hand_patch(model: str, layer_ids: list[int], longest: int, ranks: int) -> Callable[[Batch], Any]:
    """What users of vLLM 0.16 wrote into site-packages: the consumer's calls are mended so that they go through; it
    captures with its own copy of Llama's forward, and its workers' reply is pickled."""
    os.environ["VLLM_COMPAT_DISABLE"] = OURS.replace(" ", ",")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the consumer asks CUDA for its memory in this process
    import vllm_compat

    vllm_compat.activate()
    from speculators.data_generation import vllm_hidden_states_generator as module

    plan = module.get_kv_cache_config_from_groups
    setup = module.VllmHiddenStatesGenerator._setup_capture

    def name_as_before(worker: Any) -> None:
        inner = worker.model_runner.get_model().model
        inner.get_input_embeddings = inner.embed_input_ids

    def setup_capture(generator: Any) -> None:
        setup(generator)
        generator.executor.collective_rpc(name_as_before)

    module.get_kv_cache_config_from_groups = lambda kv_cache_specs, **kwargs: plan(**kwargs)
    module.VllmHiddenStatesGenerator._setup_capture = setup_capture
    generator = module.VllmHiddenStatesGenerator(
        model, layer_ids=layer_ids, max_model_len=longest + 1, tensor_parallel_size=ranks
    )
    return lambda batch: generator.generate(batch)


def main() -> None:
    way, model, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ways = {"hugging_face": hugging_face, "vllm_extractor": vllm_extractor, "hand_patch": hand_patch}
    run = ways[way](model, settings["layer_ids"], settings["tokens"], settings["tensor_parallel_size"])
    prompts = random_prompts(settings["prompts"], settings["tokens"])
    size = settings["batch_size"][0]
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    run(batches[0])  # warm up
    seconds = []
    for _ in range(settings["rounds"]):
        begin = time.perf_counter()
        for batch in batches:
            run(batch)
        seconds.append(time.perf_counter() - begin)
    # Workers write to stdout, too.
    Path(sys.argv[4]).write_text(str(settings["prompts"] * settings["tokens"] / statistics.median(seconds)))


if __name__ == "__main__":
    main()
