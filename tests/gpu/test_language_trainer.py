"""`PolicyTrainer` and `CriticTrainer` on the device: the numbers of the CPU, and memory that they
give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.messages.language import TrainingSample
from rlinf_async.weights.pack import unpack
from tests.backends.language.kit import (
    QWEN3,
    UNTIED,
    micro_batches,
    samples,
    trainer_config,
    weights,
)
from tests.gpu.kit import DEVICE, assert_near, held

LOSS = LanguageLossConfig(kl_coefficient=0.05, entropy_coefficient=0.01)
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
WIDE = QWEN3 | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}
"""some 15 million parameters: more bytes than a kernel library's own workspace"""


def policy(device: str, model: dict[str, Any] | None = None, **fields: Any) -> PolicyTrainer:
    sharding = {"optimizer": OPTIMIZER, "device": device, **fields}
    config = trainer_config(model, loss=LOSS, reference=True, fsdp=sharding)
    return PolicyTrainer(config, 1, 0)


def learn(trainer: PolicyTrainer, steps: int = 3) -> list[dict[str, float]]:
    """Train as an actor does; the metrics of each step."""
    found = []
    for step in range(steps):
        batch = samples(4, seed=step)
        previous, reference = trainer.log_probs(batch), trainer.log_probs(batch, reference=True)
        for one, before, first in zip(batch, previous, reference, strict=True):
            one.prev_log_prob, one.ref_log_prob = before, first
        ready = trainer.compute_advantages(batch)
        found.append(dict(trainer.training_step(micro_batches(ready, 5))))
    trainer.end_iteration()
    return found


def critics_own(trainer: CriticTrainer) -> list[TrainingSample]:
    batch = samples(4)
    for one, value in zip(batch, trainer.values(batch), strict=True):
        one.value = value
    return trainer.compute_advantages(batch)


@pytest.mark.parametrize("model", [QWEN3, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_float32_learns_what_the_cpu_learns(model: dict[str, Any], checkpointing: bool) -> None:
    def trainer(device: str) -> PolicyTrainer:
        sharding = {"optimizer": OPTIMIZER, "device": device}
        config = trainer_config(
            model, loss=LOSS, reference=True, checkpointing=checkpointing, fsdp=sharding
        )
        return PolicyTrainer(config, 1, 0)

    here, there = trainer(DEVICE), trainer("cpu")
    for mine, theirs in zip(learn(here), learn(there), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-3)
    assert_near(weights(here), weights(there), 1e-4)
    batch = samples()
    for one, two in zip(here.log_probs(batch), there.log_probs(batch), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_samples_of_all_lengths_in_one_row_have_the_log_probs_of_the_cpu(kind: str) -> None:
    model = {name: value for name, value in QWEN3.items() if name != "head_dim"}
    model |= {"model_type": kind} | ({"sliding_window": 4} if kind == "mistral" else {})
    here, there = policy(DEVICE, model), policy("cpu", model)
    batch = samples(16, 4)
    for one, two in zip(here.log_probs(batch), there.log_probs(batch), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4, rtol=0)


def test_bfloat16_learns_about_what_float32_learns() -> None:
    here, there = policy(DEVICE, precision="bfloat16"), policy("cpu")
    for mine, theirs in zip(learn(here), learn(there), strict=True):
        assert mine["skipped"] == 0.0
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.05)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert_near(weights(here), weights(there), 1e-2)


def test_float16_learns_once_its_loss_scale_has_come_down() -> None:
    skipped = [one["skipped"] for one in learn(policy(DEVICE, precision="float16"), 12)]
    assert skipped == sorted(skipped, reverse=True)
    assert skipped[-1] == 0.0


def test_a_critic_learns_what_the_cpu_learns() -> None:
    def critic(device: str) -> CriticTrainer:
        sharding = {"optimizer": OPTIMIZER, "device": device}
        return CriticTrainer(trainer_config(fsdp=sharding), 1, 0)

    here, there = critic(DEVICE), critic("cpu")
    for _ in range(3):
        mine = here.training_step(micro_batches(critics_own(here), 5))
        theirs = there.training_step(micro_batches(critics_own(there), 5))
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
    for one, two in zip(here.values(samples()), there.values(samples()), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3, rtol=0)


def test_an_offloaded_trainer_holds_no_memory_and_goes_on_as_if_it_had_not_been() -> None:
    before = held()
    trainer, other = policy(DEVICE, WIDE), policy(DEVICE, WIDE)
    learn(trainer, 1)
    learn(other, 1)
    del other
    onloaded = held() - before
    assert onloaded > 3 * 4 * 10_000_000  # weights, moments and gradients
    state = weights(trainer)
    trainer.offload()
    left = torch.cuda.memory_reserved()  # offload itself gives back what torch keeps
    assert held() - before < 1 << 24  # a kernel library's workspace
    assert left - before < 1 << 26
    assert_near(weights(trainer), state, 0.0)  # it can be published meanwhile
    trainer.onload()
    assert held() - before == pytest.approx(onloaded, rel=0.05)
    again = policy(DEVICE, WIDE)
    learn(again, 1)
    for mine, theirs in zip(learn(trainer, 2), learn(again, 2), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert_near(weights(trainer), weights(again), 1e-4)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("onto", [DEVICE, "cpu"])
def test_a_checkpoint_goes_on_on_either_device(tmp_path: Path, offloaded: bool, onto: str) -> None:
    trainer = policy(DEVICE, WIDE)
    learn(trainer)
    if offloaded:
        trainer.offload()
    trainer.save_checkpoint(tmp_path / "one", {"note": 7})
    if offloaded:
        trainer.onload()
    resumed = policy(onto, WIDE)
    assert resumed.load_checkpoint(tmp_path / "one") == [{"note": 7}]
    assert resumed.version == trainer.version
    assert_near(weights(resumed), weights(trainer), 0.0)
    mine, theirs = learn(resumed, 1)[0], learn(trainer, 1)[0]
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert_near(weights(resumed), weights(trainer), 1e-4)


def test_a_checkpoint_is_copied_beside_the_next_forward_passes(tmp_path: Path) -> None:
    """Through pinned memory, in a stream of its own: what the next step changes is not in it."""
    trainer = policy(DEVICE, WIDE)
    learn(trainer)
    state = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    written = trainer.begin_checkpoint(tmp_path / "one")
    learn(trainer)
    written.result(60)
    resumed = policy(DEVICE, WIDE)
    resumed.load_checkpoint(tmp_path / "one")
    assert_near(weights(resumed), state, 0.0)


def test_offloaded_weights_and_moments_lie_in_pinned_memory() -> None:
    """Other memory is copied thirty times slower."""
    trainer = policy(DEVICE)
    learn(trainer, 1)
    trainer.offload()
    manager = trainer.manager
    moments = [one for state in manager.optimizer.state.values() for one in state.values()]
    for tensor in (*manager.model.parameters(), *manager.model.buffers(), *moments):
        assert tensor.device.type == "cpu"
        assert tensor.is_pinned()
    trainer.onload()
    assert {one.device.type for one in manager.model.parameters()} == {DEVICE}


def test_published_weights_are_loaded_by_a_trainer_on_either_device() -> None:
    trainer = policy(DEVICE)
    learn(trainer)
    update = trainer.publish()
    for device in (DEVICE, "cpu"):
        other = policy(device)
        other.load(update)
        assert other.version == update.version
        assert_near(weights(other), unpack(update), 0.0)
    second = trainer.publish()  # nothing has changed: the buckets are the same ones
    pairs = zip(second.buckets, update.buckets, strict=True)
    assert all(one.data is two.data for one, two in pairs)
    assert second.checksum == update.checksum
