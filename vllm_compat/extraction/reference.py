"""The reference: what Hugging Face's own forward pass computes for each prompt, one prompt at a time.

It shares no code with the extraction: no vLLM, no batching, no chunking, no cache. A prompt that is computed
alone cannot get another prompt's rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.routers import Router, find_routers, listening, shaking

if TYPE_CHECKING:
    import torch

# How transformers' classes call them: most; GPT-2 and its kin; MPT.
_LAYERS = ("layers", "h", "blocks")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
EMBEDDINGS = -1  # the "layer id" of what enters the first decoder layer


class Reference:
    """A model loaded once, asked for the hidden states of one prompt after the other.

    `device` is "cpu", "cuda", "cuda:1", ..., or "auto", which spreads a model over all GPUs and the host's memory
    (that needs the package accelerate). `trust_remote_code` runs Python code that comes with the model.
    """

    def __init__(
        self, model_path: Path | str, *, dtype: torch.dtype, device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        self._model = _load(model_path, dtype, device, trust_remote_code).eval()
        self._decoder, self._layers = _decoder(self._model)
        # The head's logits are not wanted: for a long prompt and a large vocabulary they are gigabytes.
        keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._without_logits = {"logits_to_keep": 1} if keeps else {}

    @property
    def layers(self) -> int:
        """How many decoder layers the model has."""
        return len(self._layers)

    @property
    def vocabulary(self) -> int:
        """How many token ids have an embedding."""
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def hidden_size(self) -> int:
        """Length of a row."""
        return int(self._model.config.get_text_config().hidden_size)

    def states(
        self, prompt: Sequence[int], layer_ids: Sequence[int], *, rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Hidden states of `prompt`: one [tokens, hidden] tensor on the CPU for each of `layer_ids`, in the model's
        dtype; with `rows` only these rows of it.

        Layer id k is the output of decoder layer k, residual added, before the final norm, also for the last
        layer; `EMBEDDINGS` (-1) is the input of layer 0. It is taken with a hook on the layer itself: the last
        entry of `output_hidden_states` is already normed. Raises ValueError for a layer that the model has not,
        and for an empty prompt.
        """
        for layer_id in layer_ids:
            if not EMBEDDINGS <= layer_id < self.layers:
                raise ValueError(f"layer {layer_id} is not one of the model's layers 0 to {self.layers - 1}")
        if not len(prompt):
            raise ValueError("the prompt is empty")
        taken = self._pass(prompt, layer_ids, rows=rows)
        return [taken[layer_id][0] for layer_id in layer_ids]

    @cached_property
    def routers(self) -> tuple[Router, ...]:
        """Those that pick experts; none in a dense model."""
        return find_routers(self._layers, self._model.config.get_text_config())

    def picks(self, prompt: Sequence[int]) -> dict[Router, torch.Tensor]:
        """The numbers of the experts that each router picks: [tokens, experts for each token], ascending."""
        with listening(self.routers) as picks:
            self._pass(prompt, ())
        return picks

    def shaken(
        self, prompt: Sequence[int], layer_ids: Sequence[int], *, size: float, seed: int, passes: int
    ) -> tuple[dict[int, torch.Tensor], dict[Router, torch.Tensor]]:
        """What comes of `prompt` with noise on the input of each decoder layer, `size` of a row's length long, in so
        many passes at once: by layer id the states, [passes, tokens, hidden] on the CPU, and what each router picks,
        [passes * tokens, experts for each token]. The same seed gives the same noise."""
        with shaking(self._layers, size, seed=seed), listening(self.routers) as picks:
            return self._pass(prompt, layer_ids, times=passes), picks

    def _pass(
        self, prompt: Sequence[int], layer_ids: Sequence[int], *, rows: Sequence[int] | None = None, times: int = 1
    ) -> dict[int, torch.Tensor]:
        """One forward pass of a batch of `times` the same prompt: [times, tokens, hidden] by layer id."""
        import torch

        taken: dict[int, torch.Tensor] = {}

        def take(layer_id: int, output: Any) -> None:
            # A decoder layer returns the tensor, or in older releases a tuple that starts with it.
            states = (output[0] if isinstance(output, tuple) else output).detach().reshape(times, len(prompt), -1)
            taken[layer_id] = (states if rows is None else states[:, list(rows)]).cpu()

        handles = []
        for layer_id in set(layer_ids):
            if layer_id == EMBEDDINGS:
                handles.append(
                    self._layers[0].register_forward_pre_hook(
                        lambda _module, args, kwargs: take(EMBEDDINGS, args or kwargs["hidden_states"]),
                        with_kwargs=True,
                    )
                )
            else:
                handles.append(
                    self._layers[layer_id].register_forward_hook(
                        lambda _module, _args, output, layer_id=layer_id: take(layer_id, output)
                    )
                )
        try:
            with torch.inference_mode():
                ids = torch.as_tensor(prompt, dtype=torch.long, device=self._device).expand(times, -1)
                self._model(input_ids=ids, use_cache=False, **self._without_logits)
        finally:
            for handle in handles:
                handle.remove()
        return taken

    def normed(self, states: torch.Tensor) -> torch.Tensor | None:
        """`states` [rows, hidden] after the model's final norm, on the CPU; None if that norm is not found."""
        import torch

        named = (getattr(self._decoder, name, None) for name in _NORMS)
        norm = next((each for each in named if each is not None), None)
        if norm is None:
            return None
        weight = next(norm.parameters())
        with torch.inference_mode():
            return norm(states.to(weight.device, weight.dtype)).cpu()

    @cached_property
    def _device(self) -> torch.device:
        return self._model.get_input_embeddings().weight.device


def reference_states(
    model_path: Path | str,
    prompts: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[list[torch.Tensor]]:
    """Hidden states of `prompts`: per prompt one [tokens, hidden] tensor of `dtype` for each of `layer_ids`, as
    `Reference.states` has them. Raises ValueError as that does, naming the prompt."""
    reference = Reference(model_path, dtype=dtype, device=device)
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty")
    return [reference.states(prompt, layer_ids) for prompt in prompts]


def _load(model_path: Path | str, dtype: torch.dtype, device: str, trust_remote_code: bool) -> Any:
    """The model in `dtype`. Loaded in it, not cast to it: a cast would round the rotary frequencies too."""
    import transformers
    from packaging.version import Version

    # The argument was renamed in 4.56.
    keyword = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    kwargs: dict[str, Any] = {keyword: dtype, "trust_remote_code": trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    auto = transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:  # given text alone
        auto = transformers.AutoModelForImageTextToText
    if device == "auto":
        return auto.from_pretrained(model_path, device_map="auto", **kwargs)
    return auto.from_pretrained(model_path, **kwargs).to(device)


def _decoder(model: Any) -> tuple[Any, torch.nn.ModuleList]:
    """The text model and its decoder layers, also inside a multi-modal model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inner = getattr(model, "model", None)
    for owner in (decoder, inner, getattr(inner, "language_model", None), getattr(model, "base_model", None)):
        for name in _LAYERS:
            if (layers := getattr(owner, name, None)) is not None:
                return owner, layers
    raise ValueError(
        f"cannot find the decoder layers of {type(model).__name__} (looked for {', '.join(_LAYERS)} in the model's "
        "get_decoder(), model, model.language_model and base_model): `vllm-compat verify` cannot judge this model; "
        "that is worth an issue"
    )
