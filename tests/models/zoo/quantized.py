"""Quantized checkpoints made on the spot, and what their reference is: the same weights, dequantized, in float32.

Where a format rounds activations too, the reference rounds them by the same published rule (dynamic, symmetric, one
scale per token) at the inputs of the same layers, so what remains is 16-bit rounding, and a value that it carries over
a step's edge. For int8 that is one step, 1/127 of the token's largest value, which the tolerance for bfloat16 has room
for. For e4m3 it is up to 2^-4 of the value itself, at four inputs of a layer; as roundings of independent sign (the
rule of `vllm_compat/extraction/compare.py`) they are worth 2 * 2^-4 of a row's length after the first layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from zoo.build import Checkpoint

GROUP = 32
Tensors = dict[str, "torch.Tensor"]


def write(kind: str, model: Path, folder: Path) -> Checkpoint:
    """Two folders beside `model`: the quantized checkpoint, and the dequantized one for transformers."""
    import safetensors.torch
    import torch

    from zoo.build import Checkpoint

    quantize, config, adapt, words, rounding = KINDS[kind]
    ours, reference = folder / "quantized", folder / "dequantized"
    shutil.copytree(model, ours)
    shutil.copytree(model, reference)
    quantized: Tensors = {}
    plain: Tensors = {}
    for name, weight in safetensors.torch.load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors, dequantized = quantize(weight.float())
            base = name.removesuffix(".weight")
            quantized |= {f"{base}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            plain[name] = dequantized.to(torch.float32).contiguous()
        else:
            quantized[name] = plain[name] = weight
    safetensors.torch.save_file(quantized, ours / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(plain, reference / "model.safetensors", metadata={"format": "pt"})
    file = ours / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}, indent=1))
    return Checkpoint(ours, reference, adapt, words, rounding)


def _per_channel_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    whole = (weight / scale).round().clamp(-127, 127)
    return {"weight": whole.to(torch.int8), "weight_scale": scale}, whole * scale


def _per_channel_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def _groups_of_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' pack-quantized: eight values of a row in one int32, the first in the lowest bits, plus 8."""
    import torch

    rows, columns = weight.shape
    grouped = weight.view(rows, -1, GROUP)
    scale = (grouped.abs().amax(dim=2, keepdim=True) / 7).bfloat16().float()
    whole = (grouped / scale).round().clamp(-8, 7)
    tensors = {
        "weight_packed": _packed((whole + 8).view(rows, columns), range(8)),
        "weight_scale": scale.squeeze(2).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, (whole * scale).view(rows, columns)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """AutoAWQ's GEMM version: [in, out], a zero point for each group, eight outputs in one int32 in its own order."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, GROUP)
    low, high = grouped.amin(dim=2, keepdim=True).clamp(max=0), grouped.amax(dim=2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    whole = (grouped / scale + zero).round().clamp(0, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _packed(whole.view(rows, columns).T, order),
        "qzeros": _packed(zero.squeeze(2).T, order),
        "scales": scale.squeeze(2).T.bfloat16(),
    }
    return tensors, ((whole - zero) * scale).view(rows, columns)


def _packed(values: torch.Tensor, order: Any) -> torch.Tensor:
    """Eight 4-bit values of the last dimension in one int32; ``order[i]`` is the one in bits 4i to 4i+3."""
    import torch

    eights = values.to(torch.int64).reshape(values.shape[0], -1, 8)
    word = torch.zeros(eights.shape[:2], dtype=torch.int64)
    for nibble, source in enumerate(order):
        word |= eights[:, :, source] << (4 * nibble)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def _untouched(model: Any) -> None:
    pass


def _rounded_to_int8(model: Any) -> None:
    def round_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = args[0].abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
        return ((args[0] / scale).round() * scale, *args[1:])

    _before_projections(model, round_input)


def _rounded_to_fp8(model: Any) -> None:
    import torch

    def round_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = args[0].abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 448
        return ((args[0] / scale).to(torch.float8_e4m3fn).to(args[0].dtype) * scale, *args[1:])

    _before_projections(model, round_input)


def _before_projections(model: Any, hook: Callable[..., Any]) -> None:
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(hook)


def _compressed(kind: str, bits: int, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[kind],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": bits,
                    "type": "float" if kind == "fp8" else "int",
                    "symmetric": True,
                    "dynamic": False,
                    **weights,
                },
                "input_activations": activations,
            }
        },
    }


def _per_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}


_CHANNEL = {"strategy": "channel"}
KINDS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], None], str, float]] = {
    "compressed-tensors W8A8 int8": (
        _per_channel_int8,
        _compressed("int8", 8, _CHANNEL, _per_token("int")),
        _rounded_to_int8,
        "Hugging Face, float32, dequantized weights, inputs of the projections rounded to int8 per token",
        0.0,
    ),
    "compressed-tensors W4A16": (
        _groups_of_int4,
        _compressed("int4", 4, {"strategy": "group", "group_size": GROUP}, None),
        _untouched,
        "Hugging Face, float32, dequantized weights",
        0.0,
    ),
    "AWQ": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        _untouched,
        "Hugging Face, float32, dequantized weights",
        0.0,
    ),
    "compressed-tensors FP8": (
        _per_channel_fp8,
        _compressed("fp8", 8, _CHANNEL, _per_token("float")),
        _rounded_to_fp8,
        "Hugging Face, float32, dequantized weights, inputs of the projections rounded to e4m3 per token",
        2 * 2.0**-4,
    ),
}
