"""How finely vLLM's kernels round."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version


def cut() -> float:
    """How much more than rounding to nearest a result of vLLM's kernels may be off: 2 where they drop bits, else 1.

    Up to 0.13 the CPU build runs norm, rotary embedding and activation in C++ of its own (`CustomOp.forward_cpu` calls
    `forward_cuda`, vllm/model_executor/custom_op.py), which drops the low bits of a result on processors without
    bfloat16; since 0.14 it calls PyTorch, which rounds. Measured on the tiny model, AVX2: Hugging Face's own forward
    with these kernels in place is up to 3.2 % away from itself at layer 0, in the same rows in which vLLM is up to
    3.9 % away; with another kernel of PyTorch for the attention it is 1.5 %.
    """
    from vllm.model_executor.custom_op import CustomOp
    from vllm.platforms import current_platform

    own_kernels = "forward_cuda" in CustomOp.forward_cpu.__code__.co_names
    return 2.0 if current_platform.is_cpu() and own_kernels else 1.0


def cut_of(release: str, *, cpu: bool) -> float:
    """`cut` for what another installation computed: the vLLM `release`, on a CPU or not."""
    try:
        return 2.0 if cpu and Version(release) < Version("0.14") else 1.0
    except InvalidVersion:  # a build that names no release
        return 1.0
