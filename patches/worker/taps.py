"""Taps: forward hooks on the decoder layers of the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Where vLLM's classes keep their decoder layers; the last three are GPT-NeoX, MPT and ChatGLM.
PLACES = (
    *("model.layers", "layers", "model.decoder.layers", "transformer.h", "transformer.layers"),
    *("gpt_neox.layers", "transformer.blocks", "transformer.encoder.layers"),
)
Sink = Callable[[int, str, Any], None]


def decoder_layers(model: Any, expected: int) -> Any:
    """The text model's decoder layers: a module list of ``expected`` (``num_hidden_layers``) entries.

    Raises:
        ValueError: not found; names the model class and where it was looked for.
    """
    text_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    looked = []
    for path in PLACES:
        found: Any = text_model
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None and hasattr(found, "__len__"):
            if len(found) == expected:
                return found
            path += f" (has {len(found)})"
        looked.append(path)
    raise ValueError(
        f"vllm_compat: model class {type(model).__name__} is not supported: no list of {expected} decoder layers was "
        f"found in its text model {type(text_model).__name__}; looked at {', '.join(looked)}. If it keeps them "
        "elsewhere, that is worth an issue."
    )


def tap(layers: Any, layer_ids: list[int], sink: Sink) -> list[Any]:
    """Call ``sink(layer_id, class_name, output)`` with what a layer has returned, when one of ``layer_ids`` has run.

    A tap returns nothing, so the model's forward stays as it is; ``sink`` must not raise, since the other ranks of a
    tensor-parallel group would wait for this one in their next collective operation.

    Returns:
        the hook handles.
    """

    def hook_for(layer_id: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            sink(layer_id, type(module).__name__, output)

        return hook

    return [layers[layer_id].register_forward_hook(hook_for(layer_id)) for layer_id in layer_ids]


def residual_stream(layer: str, output: Any) -> torch.Tensor:
    """The residual stream after a decoder layer, as a tensor of its own ``[tokens, hidden]``.

    vLLM's decoder layers return ``(hidden_states, residual)``, whose sum is the stream (the next layer's fused norm
    adds them), or the stream itself. The next layer may write into both, so the result never shares their memory.

    Raises:
        TypeError: the layer returned something else.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], torch.Tensor):
        hidden, residual = output
        if residual is None:
            return hidden.clone()
        if isinstance(residual, torch.Tensor) and residual.shape == hidden.shape:
            return hidden + residual
    kinds = [type(part).__name__ for part in output] if isinstance(output, tuple) else type(output).__name__
    raise TypeError(
        f"vllm_compat: decoder layer {layer} returned {kinds}; expected a tensor, or a pair of hidden states and "
        "residual of one shape"
    )
