"""The consumer's own trainer reads what the demo wrote and learns from it: one step, on the CPU.

Everything of the training is the consumer's: data set, collation, batch sampler, vocabulary mapping, draft
model and trainer, put together as its training script does. Only the device differs, which the trainer takes
as its `local_rank`, and torch.compile is off: compiling takes minutes and is not what is tested.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOTAL_LENGTH = 1024
DRAFT_VOCABULARY = 128


def test_one_training_step_on_the_demos_files(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [str(Path(sys.executable).with_name("vllm-compat")), "demo", "--json", "--output-dir", str(folder)]
    made = _run([*command, "--samples", "4", "--seq-length", "256"])
    assert made.returncode == 0, made.stderr[-4000:]

    trained = _run([sys.executable, __file__, str(folder)], TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")
    assert trained.returncode == 0, trained.stderr[-4000:]
    result = json.loads(trained.stdout.splitlines()[-1])

    assert result["samples"] == 4
    # Three layers feed the draft model, the last one the verifier's head; one row is shifted away.
    for shape in result["shapes"]:
        rows = shape["input_ids"][0]
        assert 0 < rows < 256
        assert shape["hidden_states"] == [rows, 3 * 64]
        assert shape["verifier_last_hidden_states"] == [rows, 64]
    assert result["steps"] == len(result["losses"]) >= 1
    assert all(math.isfinite(loss) and loss > 0 for loss in result["losses"])
    # Every weight that is learned has moved; the verifier's own stay as they are.
    for name, moved in result["moved"].items():
        assert (moved > 0) == (name not in ("embed_tokens.weight", "verifier_lm_head.weight")), name
    assert result["finite"]


def _run(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | settings
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def train(folder: Path) -> dict[str, Any]:
    """One epoch over `folder/training_data`: what the data look like, the losses, how far weights moved."""
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.trainer import Trainer, TrainerConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, LlamaConfig

    verifier = AutoConfig.from_pretrained(folder / "model")
    layer = LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=verifier.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=verifier.num_attention_heads,
        num_key_value_heads=verifier.num_key_value_heads,
        max_position_embeddings=verifier.max_position_embeddings,
        head_dim=verifier.head_dim,
    )
    layer._attn_implementation = "simple_flex_attention"
    draft_to_target, target_to_draft = build_vocab_mappings_from_distribution(
        torch.load(folder / "token_freq.pt", weights_only=True), DRAFT_VOCABULARY, verifier.vocab_size
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(proposal_type="greedy", speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(folder / "model"), architectures=verifier.architectures),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config=config, t2d=target_to_draft, d2t=draft_to_target)

    dataset = Eagle3SampleFileDataset(max_len=TOTAL_LENGTH, datapath=str(folder / "training_data"))
    loader = DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=TOTAL_LENGTH, lengths=dataset.approx_lengths, num_replicas=1, rank=0
        ),
        collate_fn=create_collate_fn(TOTAL_LENGTH),
    )
    trainer = Trainer(
        model,
        TrainerConfig(
            lr=1e-3,
            num_epochs=1,
            save_path=str(folder / "checkpoints"),
            local_rank="cpu",
            train_call_kwargs={"ttt_steps": 2},
        ),
        loader,
    )
    losses = _Losses()
    logging.getLogger("speculators.metrics").addHandler(losses)
    logging.getLogger("speculators.metrics").setLevel(logging.INFO)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer.train_epoch(0)
    after = {name: weight.detach() for name, weight in model.named_parameters()}
    return {
        "samples": len(dataset),
        "shapes": [{key: list(value.shape) for key, value in sample.items()} for sample in dataset],
        "steps": trainer.global_step,
        "losses": losses.values,
        "moved": {name: float((after[name] - before[name]).abs().max()) for name in before},
        "finite": all(bool(weight.isfinite().all()) for weight in after.values()),
    }


class _Losses(logging.Handler):
    """Keeps the loss of each step, which the trainer only logs."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        self.values.append(float(message["train"]["loss"]))


if __name__ == "__main__":
    print(json.dumps(train(Path(sys.argv[1]))))
