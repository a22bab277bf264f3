"""A small trained language model's checkpoint, and what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.checkpoint.folders import Metadata, read_metadata
from rlinf_async.backends.checkpoint.reading import read_checkpoint
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from tests.backends.language.kit import micro_batches, sample, samples, trainer_config
from tests.backends.models import make_model, qwen3, save_folder

EXPERTS = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
}
"""Architectures with experts, and a name that their checkpoints have."""

PROMPT, RESPONSE = np.arange(3, 9, dtype=np.int32), np.arange(20, 32, dtype=np.int32)


def model_folder(folder: Path, **fields: Any) -> Path:
    """A folder with tokenizer and weights, as a run begins with it."""
    config = qwen3(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    save_folder(folder, config, make_model(config, 3, sharpness=0.1))
    return folder


def trainer_of(model: Path, world_size: int = 1, rank: int = 0) -> PolicyTrainer:
    config = LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=LanguageModelConfig(path=str(model)),
            optimizer=OptimizerConfig(lr=1e-2, eps=1e-6),
        ),
        advantage=LanguageAdvantageConfig(),
        loss=LanguageLossConfig(),
    )
    return PolicyTrainer(config, world_size, rank)


def step(trainer: PolicyTrainer, number: int) -> float:
    """One optimizer step over this rank's share; its loss."""
    manager = trainer.manager
    batch = [
        one for one in samples(4, seed=number) if one.group % manager.world_size == manager.rank
    ]
    for one in batch:
        one.value = None
    ready = trainer.compute_advantages(batch)
    return dict(trainer.training_step(micro_batches(ready, len(batch))))["grad_norm"]


def trained(model: Path, checkpoint: Path) -> PolicyTrainer:
    """A trainer after two steps and its checkpoint."""
    trainer = trainer_of(model)
    step(trainer, 0)
    step(trainer, 1)
    trainer.end_iteration()
    trainer.save_checkpoint(checkpoint, {"position": 7})
    return trainer


def trained_experts(folder: Path, kind: str) -> PolicyTrainer:
    """A trainer of a model with experts after a step; its checkpoint is ``folder / checkpoint``."""
    described: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48 if kind == "qwen3_moe" else 16,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        ("num_experts" if kind == "qwen3_moe" else "num_local_experts"): 4,
    }
    if kind == "qwen3_moe":
        described["moe_intermediate_size"] = 16
    trainer = PolicyTrainer(trainer_config(described), 1, 0)
    step(trainer, 0)
    trainer.end_iteration()
    trainer.save_checkpoint(folder / "checkpoint", {})
    return trainer


def own_log_probs(trainer: PolicyTrainer) -> Tensor:
    """Of `RESPONSE` after `PROMPT`."""
    one = msgspec.structs.replace(
        sample(0, 0), prompt_ids=PROMPT, response_ids=RESPONSE, temperature=1.0
    )
    [found] = trainer.log_probs([one])
    return torch.from_numpy(found)


def noted(folder: Path) -> Metadata:
    found = read_metadata(folder)
    assert isinstance(found, Metadata)
    return found


def contents(folder: Path) -> dict[str, Tensor]:
    """Every global tensor, whole."""
    return {name: one.whole().clone() for name, one in read_checkpoint(folder).tensors.items()}


def assert_same_tensors(left: Path, right: Path) -> None:
    ours, theirs = contents(left), contents(right)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert torch.equal(one, theirs[name]), name
