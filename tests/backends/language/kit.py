"""A tiny language model built from its configuration, and samples for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import MicroBatch
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.messages.language import TrainingSample
from rlinf_async.weights.pack import unpack

VOCABULARY = 61

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # logits that differ, as those of a trained model do
}
UNTIED = QWEN3 | {"tie_word_embeddings": False}


def trainer_config(
    model: dict[str, Any] | None = None,
    *,
    loss: LanguageLossConfig | None = None,
    advantage: LanguageAdvantageConfig | None = None,
    checkpointing: bool = False,
    fsdp: dict[str, Any] | None = None,
    **fields: Any,
) -> LanguageTrainerConfig:
    described = LanguageModelConfig(config=model or QWEN3, activation_checkpointing=checkpointing)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=0.5)
    sharding: dict[str, Any] = {"optimizer": optimizer} | (fsdp or {})
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(model=described, **sharding),
        advantage=advantage or LanguageAdvantageConfig(),
        loss=loss or LanguageLossConfig(),
        **fields,
    )


def sample(group: int, index: int, *, scored: bool = True, seed: int = 0) -> TrainingSample:
    """Random tokens of a length of its own; log-probs as of a policy near the uniform one."""
    random = np.random.default_rng([seed, group, index])
    prompt, tokens = int(random.integers(1, 7)), int(random.integers(1, 16))

    def near(center: float) -> Any:
        return (center + 0.5 * random.normal(size=tokens)).astype(np.float32)

    log_prob = near(-math.log(VOCABULARY))
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=random.integers(0, VOCABULARY, prompt).astype(np.int32),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        loss_mask=np.full(tokens, scored),
        log_prob=log_prob,
        version=np.zeros(tokens, np.int32),
        temperature=float(random.choice([0.7, 1.0, 1.3])),
        reward=float(random.normal()) if scored else math.nan,
        scored=scored,
        prev_log_prob=log_prob + 0.1 * near(0.0),
        ref_log_prob=log_prob + 0.1 * near(0.0),
        value=near(0.0),
    )


def samples(groups: int = 2, size: int = 4, seed: int = 0) -> list[TrainingSample]:
    """Whole groups; the last sample of every second one was not scored."""
    return [
        sample(group, index, scored=index < size - 1 or group % 2 == 0, seed=seed)
        for group in range(groups)
        for index in range(size)
    ]


def micro_batches(batch: list[TrainingSample], size: int) -> list[MicroBatch]:
    return [
        MicroBatch(batch[start : start + size], start + size >= len(batch))
        for start in range(0, len(batch), size)
    ]


def weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return unpack(trainer.publish())


def gradients(trainer: PolicyTrainer, batch: list[TrainingSample], size: int) -> dict[str, Tensor]:
    """The clipped gradients of one optimizer step at world size 1, by parameter."""
    kept: dict[str, Tensor] = {}
    manager = trainer.manager

    def keep(*_: object) -> None:
        kept.update(
            (name, parameter.grad.clone())
            for name, parameter in manager.model.named_parameters()
            if parameter.grad is not None
        )

    hook = manager.optimizer.register_step_pre_hook(keep)
    trainer.training_step(micro_batches(batch, size))
    hook.remove()
    return kept


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=tolerance, rtol=0.0, msg=name)
