"""What a decoder layer's output means: learnt from what the model itself does with the last one.

vLLM's models return ``(hidden_states, residual)`` from a layer in two senses. In most the stream is their sum, which
the next layer's fused RMSNorm builds (``RMSNorm.forward(x, residual)``, vllm/model_executor/layers/layernorm.py). In
others (Cohere, StableLM, EXAONE 4, Granite hybrids) ``hidden_states`` is the stream already, ``residual`` a leftover.
The form does not tell; the model's final norm does: it gets both and adds them, or it gets the one.
"""

from __future__ import annotations

from typing import Any


class Meaning:
    """Watches the module that takes the last layer's output, in the first forward pass (usually vLLM's warm-up)."""

    def __init__(self, model: Any, layers: Any, dtype: Any) -> None:
        import torch

        self._model = type(model).__name__
        self._last: tuple[Any, ...] = ()
        self._verdict: str | None = None  # "" for understood, else why not
        if dtype == torch.float16 and any(hasattr(layer, "routed_scaling_factor") for layer in layers):
            # DeepSeek in float16 (vllm/model_executor/models/deepseek_v2.py) runs on a stream divided by that factor.
            self._verdict = "in float16 its layers scale the residual stream down; use bfloat16"
            return
        self._handles = [layers[-1].register_forward_hook(self._remember)]
        for parent in model.modules():
            if any(child is layers for child in parent.children()):
                for child in parent.children():
                    if child is not layers:
                        self._handles.append(child.register_forward_pre_hook(self._look, with_kwargs=True))

    def refuse_if_known(self) -> None:
        """Raises ValueError: the output of this model's layers is not understood."""
        if self._verdict:
            raise ValueError(
                f"vllm_compat: model class {self._model} is not supported: {self._verdict}. What its decoder layers "
                "return is not understood, so its rows are not guessed."
            )

    def check(self) -> None:
        """After a forward pass. Raises ValueError: not understood, or nobody took the last layer's output."""
        if self._verdict is None:
            self._verdict = "no final norm was seen to take the last decoder layer's output"
        self.refuse_if_known()

    def _remember(self, module: Any, args: Any, output: Any) -> None:
        self._last = output if isinstance(output, tuple) else (output,)

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        if not self._last or not any(value is self._last[0] for value in given):
            return  # the embedding, or another module beside the layers
        self._verdict = _verdict(module, given, [part for part in self._last if part is not None])
        self._last = ()
        for handle in self._handles:
            handle.remove()


def _verdict(norm: Any, given: list[Any], returned: list[Any]) -> str:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    taken = [value for value in given if any(value is part for part in returned)]
    if len(taken) != len(returned):
        return f"its final norm takes {len(taken)} of the {len(returned)} tensors that its last decoder layer returns"
    if len(returned) == 2 and not isinstance(norm, RMSNorm | GemmaRMSNorm):
        return f"its final norm is a {type(norm).__name__}, not an RMSNorm that adds hidden states and residual"
    return ""
