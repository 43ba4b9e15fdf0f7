"""What a decoder layer's output means: learnt from what the model itself does with the last one.

vLLM's models return ``(hidden_states, residual)`` from a layer in two senses. In most the stream is their sum, which
the next layer's fused RMSNorm builds (``RMSNorm.forward(x, residual)``, vllm/model_executor/layers/layernorm.py). In
others (Cohere, StableLM, EXAONE 4, Granite hybrids) ``hidden_states`` is the stream already, ``residual`` a leftover.
The form does not tell; the model's final norm does: it gets both and adds them, or it gets the one.

The same first pass shows a kernel of vLLM that is known to be wrong on some devices (``rotary.py``).
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

from vllm_compat.patches._models import FLOAT16
from vllm_compat.patches.worker.rotary import FAULT, rotary_modules, turns_rightly
from vllm_compat.patches.worker.taps import residual_stream

SAMPLE = 64
"""Values of the stream that ranks compare."""


class Meaning:
    """Watches the layers and the module that takes the last one's output, in the first forward pass (usually vLLM's
    warm-up)."""

    def __init__(self, model: Any, layers: Any, dtype: Any) -> None:
        import torch

        self._model = type(model).__name__
        self._last: tuple[Any, ...] = ()
        self._forms: set[int] = set()  # how many tensors the layers return
        self._verdict: str | None = None  # "" for understood, else why not
        self._handles: list[Any] = []
        self.sample: list[float] = []
        """The first values of the first row after the last layer, once they are not all zero or not finite: the same on
        every rank of a tensor-parallel group that holds the whole stream, another on each where they hold parts of a
        sum."""
        if dtype == torch.float16 and any(map(_scales_down, layers)):
            self._verdict = FLOAT16
            return
        self._handles = [layer.register_forward_hook(self._remember) for layer in layers]
        self._sampling = layers[-1].register_forward_hook(self._take_sample)
        for rotary in rotary_modules(model):
            self._handles.append(rotary.register_forward_pre_hook(self._probe, with_kwargs=True))
        for parent in model.modules():
            if any(child is layers for child in parent.children()):
                for child in parent.children():
                    if child is not layers:
                        self._handles.append(child.register_forward_pre_hook(self._look, with_kwargs=True))

    def refuse_if_known(self) -> None:
        """Raises ValueError: the output of this model's layers is not understood."""
        if self._last:  # the layers have run, and nobody has taken this
            self._conclude("no final norm was seen to take the last decoder layer's output")
        if self._verdict:
            raise ValueError(
                f"vllm_compat: model class {self._model} is not supported: {self._verdict}. Its rows are not guessed. "
                "A model that should work is worth an issue."
            )

    def check(self) -> None:
        """After a forward pass. Raises ValueError: not understood, or nobody took the last layer's output."""
        if self._verdict is None:
            self._conclude("no final norm was seen to take the last decoder layer's output")
        self.refuse_if_known()

    def _remember(self, module: Any, args: Any, output: Any) -> None:
        self._last = output if isinstance(output, tuple) else (output,)
        self._forms.add(sum(part is not None for part in self._last))

    def _take_sample(self, module: Any, args: Any, output: Any) -> None:
        try:
            rows = residual_stream(type(module).__name__, output)
        except TypeError as error:
            self._conclude(str(error).removeprefix("vllm_compat: "))
            return
        if rows.dim() == 2:
            values = rows[:1, :SAMPLE].float().flatten().tolist()
            if any(value and math.isfinite(value) for value in values):  # else a later pass shall have some
                self.sample = values
                self._sampling.remove()
        else:
            self._conclude(f"its decoder layers return tensors of shape {list(rows.shape)}, expected [tokens, hidden]")

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        if not self._last or not any(value is self._last[0] for value in given):
            return  # the embedding, or another module beside the layers
        if len(self._forms) > 1:
            self._conclude(f"some of its decoder layers return {min(self._forms)} tensors, others {max(self._forms)}")
        else:
            self._conclude(_verdict(module, given, [part for part in self._last if part is not None]))

    def _probe(self, rotary: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in (*args, *kwargs.values()) if each is not None]
        if not turns_rightly(rotary, *given[:3]):
            self._conclude(FAULT)

    def _conclude(self, verdict: str) -> None:
        self._verdict = verdict
        self._last = ()
        if verdict:  # of a model that is refused nobody compares samples
            self._sampling.remove()
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


def _scales_down(layer: Any) -> bool:
    """Whether the layer, in float16, divides what it adds by its routing factor, and with it the stream: DeepSeek
    (vllm/model_executor/models/deepseek_v2.py), openPangu. Told by the source of its parts' forward passes."""
    for part in layer.modules():
        if getattr(part, "routed_scaling_factor", None) not in (None, 1, 1.0):
            module = sys.modules[type(part).forward.__module__]
            if "torch.float16" in inspect.getsource(module):
                return True
    return False
