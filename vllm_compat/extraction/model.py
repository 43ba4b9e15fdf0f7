"""What must be known of a model before it is loaded: how wide its states are, and whether it is still the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Model:
    hidden_size: int
    sha256: str  # of its configuration, and of the names and sizes of a local folder's weights or the Hub's revision


def look_at(path: str, *, trust_remote_code: bool = True) -> Model:
    """From its configuration alone; a name on the Hub is looked up (and its configuration downloaded).

    Code that comes with the model is trusted unless told otherwise, because the consumer's own call trusts it. Raises
    OSError where there is no such model, ValueError where its configuration does not say how wide it is.
    """
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text = config if getattr(config, "hidden_size", None) else getattr(config, "text_config", None)
    width = getattr(text, "hidden_size", None)
    if not width:
        raise ValueError(f"the configuration of {path} has no hidden_size")
    file = Path(str(cached_file(path, "config.json")))
    digest = hashlib.sha256(file.read_bytes())
    if Path(path).is_dir():
        # The first kind that is there, as a loader does: a token_freq.pt beside safetensors is no other model.
        kinds = (sorted(Path(path).glob(f"*{kind}")) for kind in WEIGHTS)
        weights = next(filter(None, kinds), [])
        digest.update("".join(f"{each.name} {each.stat().st_size}\n" for each in weights).encode())
    else:
        digest.update(str(getattr(config, "_commit_hash", None)).encode())
    return Model(int(width), digest.hexdigest())
