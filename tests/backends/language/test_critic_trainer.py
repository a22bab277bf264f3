"""A critic learns values of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer
from rlinf_async.messages.language import TrainingSample
from tests.backends.language.kit import QWEN3, UNTIED, micro_batches, samples, trainer_config

GAE = LanguageAdvantageConfig(name="gae", gae_lambda=0.9)


def critic(model: dict[str, Any] | None = None, **fields: Any) -> CriticTrainer:
    return CriticTrainer(trainer_config(model, advantage=GAE, **fields), 1, 0)


def ready(trainer: CriticTrainer) -> list[TrainingSample]:
    return trainer.compute_advantages(samples(3))


@pytest.mark.parametrize("model", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_values_begin_at_0_and_come_near_the_returns(model: dict[str, Any]) -> None:
    trainer = critic(model)
    batch = ready(trainer)
    assert all(not values.any() for values in trainer.values(batch))
    errors = [trainer.training_step(micro_batches(batch, 5))["value_error"] for _ in range(150)]
    assert errors[-1] < 0.1 * errors[0]
    for one, values in zip(batch, trainer.values(batch), strict=True):
        assert values.shape == one.response_ids.shape


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_loss_is_half_the_mean_squared_error_over_trained_tokens(clip: float | None) -> None:
    trainer = critic(value_clip=clip)
    batch = ready(trainer)
    values = trainer.values(batch)
    losses = []
    for one, value in zip(batch, values, strict=True):
        assert one.returns is not None
        assert one.value is not None
        for t in np.flatnonzero(one.loss_mask):
            error = (value[t] - one.returns[t]) ** 2
            if clip is not None:
                near = one.value[t] + np.clip(value[t] - one.value[t], -clip, clip)
                error = max(error, (near - one.returns[t]) ** 2)
            losses.append(0.5 * error)
    metrics = trainer.training_step(micro_batches(batch, 4))
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["tokens"] == len(losses)


def test_the_returns_of_a_critic_are_never_normalised() -> None:
    assert not critic().normalizes


def test_a_value_sees_only_the_tokens_before_it() -> None:
    trainer = critic()
    batch = ready(trainer)
    for _ in range(3):
        trainer.training_step(micro_batches(batch, 12))
    one = batch[0]
    [before] = trainer.values([one])
    one.response_ids = one.response_ids.copy()
    one.response_ids[-1] = (one.response_ids[-1] + 1) % 61
    [after] = trainer.values([one])
    np.testing.assert_array_equal(before, after)  # the last token is in no state before it


def test_a_checkpoint_holds_the_value_head(tmp_path: Path) -> None:
    trainer = critic()
    batch = ready(trainer)
    trainer.training_step(micro_batches(batch, 12))
    trainer.save_checkpoint(tmp_path / "one")
    resumed = critic()
    resumed.load_checkpoint(tmp_path / "one")
    for ours, theirs in zip(trainer.values(batch), resumed.values(batch), strict=True):
        assert ours.any()
        np.testing.assert_array_equal(ours, theirs)


def test_samples_without_values_are_named() -> None:
    trainer = critic()
    batch = samples(1)
    with pytest.raises(ValueError, match=r"sample 0/0 has no returns or no values"):
        trainer.training_step(micro_batches(batch, 4))


def test_a_critic_says_what_it_is_not(tmp_path: Path) -> None:
    trainer = critic()
    for work in (
        lambda: trainer.log_probs(samples(1)),
        trainer.publish,
        lambda: trainer.save_pretrained(tmp_path),
    ):
        with pytest.raises(FSDPError, match=r"a critic has no .*: ask the actor"):
            work()


def test_an_untied_critic_does_not_keep_the_head_over_the_vocabulary() -> None:
    names = dict(critic(UNTIED).manager.model.named_parameters())
    assert "value_head.weight" in names
    assert not [name for name in names if "lm_head" in name]
    assert all(isinstance(parameter, torch.Tensor) for parameter in names.values())
