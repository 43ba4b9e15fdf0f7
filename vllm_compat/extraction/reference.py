"""The reference: what Hugging Face's own forward pass computes for each prompt, one prompt at a time.

It shares no code with the extraction: no vLLM, no batching, no chunking, no cache. A prompt that is computed
alone cannot get another prompt's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def reference_states(
    model_path: Path | str,
    prompts: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[list[torch.Tensor]]:
    """Hidden states of `prompts`: per prompt one [tokens, hidden] tensor of `dtype` for each of `layer_ids`.

    Layer id k is the output of decoder layer k, residual added, before the final norm, also for the last
    layer. It is taken with a hook on the layer itself: the last entry of `output_hidden_states` is already
    normed. The tensors are on the CPU. Raises ValueError for a layer that the model has not, and for an empty
    prompt.
    """
    import torch

    model = _load(model_path, dtype).to(device).eval()
    layers = _decoder_layers(model)
    for layer_id in layer_ids:
        if not 0 <= layer_id < len(layers):
            raise ValueError(f"layer {layer_id} is not one of the model's layers 0 to {len(layers) - 1}")

    taken: dict[int, torch.Tensor] = {}

    def take(layer_id: int) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            # A decoder layer returns the tensor, or in older releases a tuple that starts with it.
            taken[layer_id] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    handles = [layers[layer_id].register_forward_hook(take(layer_id)) for layer_id in set(layer_ids)]
    states = []
    try:
        with torch.inference_mode():
            for number, prompt in enumerate(prompts):
                if not len(prompt):
                    raise ValueError(f"prompt {number} is empty")
                ids = torch.as_tensor(prompt, dtype=torch.long, device=device).unsqueeze(0)
                taken.clear()
                model(input_ids=ids, use_cache=False)
                states.append([taken[layer_id].reshape(len(prompt), -1).cpu() for layer_id in layer_ids])
    finally:
        for handle in handles:
            handle.remove()
    return states


def _load(model_path: Path | str, dtype: torch.dtype) -> Any:
    """The model in `dtype`. Loaded in it, not cast to it: a cast would round the rotary frequencies too."""
    import transformers
    from packaging.version import Version

    # The argument was renamed in 4.56.
    keyword = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    kwargs: dict[str, Any] = {keyword: dtype}
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, **kwargs)


def _decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The text model's decoder layers, also inside a multi-modal model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inner = getattr(model, "model", None)
    for owner in (decoder, inner, getattr(inner, "language_model", None)):
        layers = getattr(owner, "layers", None)
        if layers is not None:
            return layers
    raise ValueError(f"cannot find the decoder layers of {type(model).__name__}")
