"""A platform plugin of vLLM for the overlay: any CPU is one without Triton.

From 0.34 on vLLM's model runner on x86 CPUs asks for Triton's CPU backend, which no index has. The runner for other
CPUs (``vllm/v1/worker/cpu/standalone_model_runner.py``) does without, but with small kernels that keep the books of
a batch and that no CPU build before 0.34 has. Here they are in plain torch, as far as prefill and greedy sampling call
them.
They are written after ``vllm/_cpu_ops.py`` and the Triton kernels of the same names in ``vllm/v1/worker/gpu``.

A state is a request's row in the tables that outlive a step; requests are rows of this step's batch, whose tokens lie
between ``query_start_loc[i]`` and ``query_start_loc[i + 1]``.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

OPS = torch.library.Library("_C", "FRAGMENT")
KERNELS: list[tuple[Callable[..., Any], tuple[str, ...]]] = []


def plugin() -> str | None:
    """The entry point: vLLM asks for the name of the platform's class."""
    if importlib.util.find_spec("vllm.v1.worker.cpu.standalone_model_runner") is None:
        return None
    return f"{__name__}.CpuWithoutTriton"


class CpuWithoutTriton(CpuPlatform):
    @classmethod
    def uses_standalone_cpu_model_runner(cls) -> bool:
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        # There the word stands only for the refusal of x86 without Triton.
        with mock.patch("vllm.triton_utils.HAS_TRITON", True):
            super().check_and_update_config(vllm_config)

    @classmethod
    def import_kernels(cls) -> None:
        super().import_kernels()
        for function, mutated in KERNELS:
            if not hasattr(torch.ops._C, function.__name__):
                OPS.define(function.__name__ + torch.library.infer_schema(function, mutates_args=mutated))
                OPS.impl(function.__name__, function, "CPU")


def kernel(*mutated: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS.append((function, mutated))
        return function

    return register


def requests(idx_mapping: Tensor, query_start_loc: Tensor) -> Iterator[tuple[int, int, int]]:
    """State, first token and the one behind the last, of each request."""
    bounds = query_start_loc.tolist()
    return zip(idx_mapping.tolist(), bounds, bounds[1:], strict=False)


@kernel("output")
def gather_block_table_cpu(
    block_table: Tensor, output: Tensor, idx_mapping: Tensor, num_blocks: Tensor, num_rows: int
) -> None:
    output[:num_rows].zero_()
    for row, state in enumerate(idx_mapping.tolist()):
        count = int(num_blocks[state])
        output[row, :count] = block_table[state, :count]


@kernel("slot_mapping")
def compute_slot_mapping_cpu(
    block_table: Tensor,
    slot_mapping: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    mapping_enabled: bool,
    pad: int,
) -> None:
    slot_mapping.fill_(pad)
    for state, start, end in requests(idx_mapping, query_start_loc):
        place = positions[start:end]
        block = place // block_size if mapping_enabled else torch.zeros_like(place)
        slot_mapping[start:end] = block_table[state, block].long() * block_size + place % block_size


@kernel("input_ids", "next_prefill_tokens")
def prepare_prefill_inputs_cpu(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    prefill_len: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    for state, start, end in requests(idx_mapping, query_start_loc):
        first, length = int(num_computed_tokens[state]), int(prefill_len[state])
        if first >= length:
            continue
        last = first + end - start
        input_ids[start:end] = all_token_ids[state, first:last]
        upcoming = next_prefill_tokens.view(-1, next_prefill_tokens.shape[-1])[:, state]
        upcoming.zero_()
        rest = all_token_ids[state, last : min(last + len(upcoming), length)]
        upcoming[: len(rest)] = rest


@kernel("pos", "seq_lens")
def prepare_pos_seq_lens_cpu(
    idx_mapping: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor, pos: Tensor, seq_lens: Tensor
) -> None:
    seq_lens.zero_()
    for row, (state, start, end) in enumerate(requests(idx_mapping, query_start_loc)):
        first = int(num_computed_tokens[state])
        pos[start:end] = torch.arange(first, first + end - start)
        seq_lens[row] = first + end - start


@kernel("input_ids")
def combine_sampled_and_draft_tokens_cpu(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    num_logits: int,
    num_new_sampled_tokens: int,
) -> Tensor:
    """The rows that make logits: without draft tokens the last one of each request."""
    if num_logits != len(idx_mapping):
        raise NotImplementedError("speculative decoding on the overlay")
    last = query_start_loc[1 : len(idx_mapping) + 1] - 1
    for row, state in enumerate(idx_mapping.tolist()):
        if int(seq_lens[row]) > int(prefill_len[state]):
            input_ids[last[row]] = last_sampled_tokens[state]
    return last


@kernel("num_computed_tokens", "last_sampled_tokens", "output_bin_counts", "all_token_ids", "total_len")
def post_update_cpu(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Optional[Tensor],  # noqa: UP045 - torch reads the schema of the annotations
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Optional[Tensor],  # noqa: UP045
    all_token_ids: Tensor,
    total_len: Tensor,
) -> None:
    for row, state in enumerate(idx_mapping.tolist()):
        if state < 0:
            continue
        tokens = sampled_tokens[row, : int(num_sampled[row])]
        if len(tokens):
            end = int(total_len[state])
            last_sampled_tokens[state] = tokens[-1]
            all_token_ids[state, end : end + len(tokens)] = tokens
            total_len[state] += len(tokens)
            if output_bin_counts is not None:
                output_bin_counts[state] += torch.bincount(tokens, minlength=output_bin_counts.shape[1])
        if query_start_loc is not None:
            num_computed_tokens[state] += query_start_loc[row + 1] - query_start_loc[row]
        num_computed_tokens[state] -= num_rejected[row]


@kernel()
def gumbel_sample_cpu(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    use_fp64: bool,
) -> Tensor:
    if temperature[expanded_idx_mapping].any():
        raise NotImplementedError("sampling at a temperature on the overlay")
    return logits.argmax(dim=-1)
