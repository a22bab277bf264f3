"""Batches for which an older policy acted: PPO relative to the policy that is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_async.algorithms.config import OF_CORRECTION, LossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import (
    EmbodiedTrainerConfig,
    FSDPConfig,
    PPOConfig,
)
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.off_policy import corrected
from rlinf_async.backends.fsdp.ppo import FlatBatch, ppo_epochs, standardized
from rlinf_async.messages.embodied import Trajectory
from tests.backends.flow_action import kit as flow
from tests.backends.fsdp_helpers import POLICY, in_processes, samples, save_result, set_up
from tests.backends.test_embodied_trainer import CONFIG, iteration, uneven, weights
from tests.backends.vision_language import kit as vision_language

FSDP = FSDPConfig(policy=POLICY, optimizer=OptimizerConfig(lr=1e-2))


def older(manager: FSDPModelManager) -> FlatBatch:
    """A batch whose log-probs and values are of another policy: weights from 0.1 to 10."""
    batch = samples(0)
    with torch.no_grad():
        now = manager.model(batch.observation, batch.action)
    spread = torch.linspace(-2.3, 2.3, len(batch.action))
    return batch._replace(log_prob=now.log_prob + spread, value=now.value + spread)


def decoupled(model: Any, batch: FlatBatch, proximal: Any, loss: LossConfig) -> Tensor:
    """Decoupled PPO (Hilton et al. 2022, equation 3 with a limit of the first factor), written out;
    and the value loss."""
    now = model(batch.observation, batch.action)
    weight = torch.exp(proximal.log_prob - batch.log_prob).clamp(max=loss.off_policy_cap)
    ratio = torch.exp(now.log_prob - proximal.log_prob)
    advantage = standardized(batch.advantage)
    clipped = ratio.clamp(1.0 - loss.clip_low, 1.0 + loss.clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    if loss.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, loss.dual_clip * advantage), gain)
    error = (now.value - batch.returns).square()
    if loss.value_clip is not None:
        moved = (now.value - proximal.value).clamp(-loss.value_clip, loss.value_clip)
        error = torch.maximum(error, (proximal.value + moved - batch.returns).square())
    total: Tensor = -(weight * gain).mean() + 0.5 * loss.value_coefficient * error.mean()
    return total


@settings(deadline=None, max_examples=30)
@given(
    cap=st.sampled_from([1.0, 1.2, 2.0, 10.0]),
    dual_clip=st.sampled_from([None, 1.5]),
    value_clip=st.sampled_from([None, 0.01]),
    micro=st.sampled_from([None, 4]),
    fused=st.booleans(),
)
def test_updates_are_those_of_decoupled_ppo(
    cap: float, dual_clip: float | None, value_clip: float | None, micro: int | None, fused: bool
) -> None:
    ours, plain = set_up(FSDP), set_up(FSDP)
    loss = LossConfig(off_policy_cap=cap, dual_clip=dual_clip, value_clip=value_clip)
    ppo = PPOConfig(epochs=3, minibatch_size=12, micro_batch_size=micro, loss=loss, fused=fused)
    batch = older(ours)
    found, _ = corrected(ours, batch, ppo)
    ppo_epochs(ours, found, ppo)
    with torch.no_grad():
        proximal = plain.model(batch.observation, batch.action)
    for _ in range(3):  # from the second on, the policy is another than the proximal one
        plain.backward(decoupled(plain.model, batch, proximal, loss))
        plain.optimizer_step()
    expected = plain.get_model_state_dict()
    for name, tensor in ours.get_model_state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-4)


def test_metrics_say_how_much_is_corrected() -> None:
    manager = set_up(FSDP)
    batch = older(manager)
    found, metrics = corrected(manager, batch, PPOConfig())
    assert found.correction is not None
    free = torch.exp(found.log_prob - batch.log_prob)
    torch.testing.assert_close(found.correction, free.clamp(max=2.0))
    assert 0 < metrics["off_policy_capped"] == pytest.approx(float((free > 2.0).float().mean()))
    assert metrics["off_policy_weight"] == pytest.approx(float(found.correction.mean()))
    change = float((found.correction - 1.0).abs().mean())
    assert metrics["off_policy_change"] == pytest.approx(change)
    huge = batch._replace(log_prob=torch.full_like(batch.log_prob, -1e4))
    found, metrics = corrected(manager, huge, PPOConfig())
    assert metrics["off_policy_weight"] == pytest.approx(2.0)
    assert metrics["off_policy_capped"] == 1.0


def test_without_weights_only_the_ratio_is_relative_to_the_present_policy() -> None:
    manager = set_up(FSDP)
    batch = older(manager)
    found, metrics = corrected(manager, batch, PPOConfig(loss=LossConfig(off_policy="none")))
    assert metrics == {}
    assert found.correction is None
    weighted, _ = corrected(manager, batch, PPOConfig())
    assert torch.equal(found.log_prob, weighted.log_prob)


def test_what_counts_nowhere_does_not_count_in_the_metrics() -> None:
    manager = set_up(FSDP)
    behaviour = samples(0).log_prob.clone().unsqueeze(1)
    with torch.no_grad():
        now = manager.model(samples(0).observation, samples(0).action).log_prob.unsqueeze(1)
    behaviour[:6], behaviour[6:] = now[:6], now[6:] - 50.0
    counted = (torch.arange(12) < 6).unsqueeze(1)
    batch = samples(0)._replace(
        log_prob=behaviour,
        advantage=samples(0).advantage.unsqueeze(1),
        returns=samples(0).returns.unsqueeze(1),
        executed=torch.ones(12, 1, dtype=torch.bool),
        weight=2.0 * counted,
    )
    _, metrics = corrected(manager, batch, PPOConfig())
    assert metrics["off_policy_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["off_policy_capped"] == 0.0


def acted(trainer: EmbodiedTrainer, batch: list[Trajectory], version: int) -> list[Trajectory]:
    """The trajectories, as the trainer's present policy acted them, under this version."""
    stamped = []
    for one in batch:
        seen = torch.from_numpy(one.observation).flatten(0, 1)
        with torch.no_grad():
            policy: Any = trainer.manager.model
            found = policy(policy.normalized(seen), torch.from_numpy(one.action).flatten(0, 1))
        log_prob = found.log_prob.numpy().reshape(one.log_prob.shape)
        value = np.concatenate([found.value.numpy().reshape(one.reward.shape), one.value[-1:]])
        versions = np.full(len(one.version), version)
        stamped.append(
            msgspec.structs.replace(one, log_prob=log_prob, value=value, version=versions)
        )
    return stamped


def test_an_iteration_of_the_present_policy_is_left_as_it_is() -> None:
    plain, stamped = EmbodiedTrainer(CONFIG, 1, 0), EmbodiedTrainer(CONFIG, 1, 0)
    metrics = plain.train(acted(plain, iteration(0), version=0))
    corrected_metrics = dict(stamped.train(acted(stamped, iteration(0), version=-1)))
    assert not metrics.keys() & set(OF_CORRECTION)
    found = [corrected_metrics.pop(name) for name in OF_CORRECTION]
    assert found == pytest.approx([1.0, 0.0, 0.0], abs=1e-5)
    assert corrected_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(stamped)[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("proximal", "near"), [("step", True), ("behaviour", False)])
def test_the_ratio_begins_at_one_however_old_the_policy_is_that_acted(
    proximal: Any, near: bool, precision: Any
) -> None:
    ppo = PPOConfig(epochs=1, minibatch_size=48, loss=LossConfig(proximal=proximal))
    fsdp = msgspec.structs.replace(CONFIG.fsdp, precision=precision)
    trainer = EmbodiedTrainer(msgspec.structs.replace(CONFIG, ppo=ppo, fsdp=fsdp), 1, 0)
    old = acted(trainer, iteration(1), version=0)
    for _ in range(5):
        trainer.train(acted(trainer, iteration(0), version=trainer.version))
    metrics = trainer.train(old)  # one update: its metrics are of before it
    assert (abs(metrics["approx_kl"]) < 1e-9) is near
    assert (metrics["clip_fraction"] == 0.0) is near
    assert (OF_CORRECTION[0] in metrics) is near
    assert math.isfinite(metrics["grad_norm"])


class Dropping(torch.nn.Module):
    """A policy with dropout, and statistics of its batches."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.norm = torch.nn.BatchNorm1d(5)
        self.fixed = torch.nn.Dropout(0.5).eval()

    def forward(self, observation: Tensor, action: Tensor) -> Any:
        seen = torch.nn.functional.dropout(self.norm(observation), 0.5, self.training)
        return self.policy(self.fixed(seen), action)


def test_the_proximal_policy_is_evaluated_as_one_that_acts() -> None:
    manager = set_up(FSDP)
    manager.model = model = Dropping(manager.model)
    modes = {name: module.training for name, module in model.named_modules()}
    batch = samples(0)
    first, _ = corrected(manager, batch, PPOConfig())
    again, _ = corrected(manager, batch, PPOConfig(minibatch_size=5))
    torch.testing.assert_close(first.log_prob, again.log_prob)
    assert int(model.norm.num_batches_tracked or 0) == 0
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not modes["fixed"]


def test_one_step_of_an_older_policy_is_enough() -> None:
    trainer = EmbodiedTrainer(CONFIG, 1, 0)
    trainer.train(iteration(0))
    batch = acted(trainer, iteration(1), version=1)
    assert OF_CORRECTION[0] not in trainer.train(batch)
    batch = acted(trainer, iteration(2), version=2)
    batch[3].version[0] = 1
    assert trainer.train(batch)["off_policy_weight"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("advantage", "log_prob"),
    [("chunk", "chunk"), ("chunk", "action"), ("action", "token"), ("token", "token")],
)
def test_every_level_of_a_chunk_is_corrected(advantage: Any, log_prob: Any) -> None:
    config = vision_language.trainer_config()
    by_token = advantage == "token"
    policy = msgspec.structs.replace(config.fsdp.policy, token_values=by_token)
    config = msgspec.structs.replace(
        config,
        fsdp=msgspec.structs.replace(config.fsdp, policy=policy),
        advantage=msgspec.structs.replace(config.advantage, level=advantage),
        ppo=msgspec.structs.replace(config.ppo, log_prob_level=log_prob, epochs=1),
    )
    ordered = [vision_language.trajectory(0), vision_language.trajectory(1)]
    for one in ordered:
        one.version = one.version - 1
        if by_token:
            one.value = one.value.repeat(vision_language.NUMBERS, axis=-1)
    assert_weighted(config, [ordered])


def assert_weighted(config: EmbodiedTrainerConfig, iterations: list[list[Trajectory]]) -> None:
    """Weights change what is learnt in the last iteration."""
    learnt = []
    for off_policy in ("truncated", "none"):
        loss = msgspec.structs.replace(config.ppo.loss, off_policy=off_policy)
        ppo = msgspec.structs.replace(config.ppo, loss=loss)
        trainer = EmbodiedTrainer(msgspec.structs.replace(config, ppo=ppo), 1, 0)
        metrics = [trainer.train(one) for one in iterations][-1]
        assert metrics["skipped_updates"] == 0.0
        if off_policy == "truncated":
            assert 0.0 < metrics["off_policy_weight"] <= 2.0
            assert metrics["off_policy_change"] > 0.0
        learnt.append(weights(trainer))
    assert any(not torch.equal(one, learnt[1][name]) for name, one in learnt[0].items())


@pytest.mark.parametrize("noise", flow.NOISES)
def test_chains_of_a_flow_policy_are_corrected(noise: str) -> None:
    config = flow.trainer_config(noise)
    one = flow.trajectory(config.fsdp.policy, 0)
    assert_weighted(config, [[one], [one]])


def train_share(rank: int, world_size: int, folder: Path, strategy: str) -> None:
    """One rank has an older policy's share, the other that of the present one."""
    fsdp = msgspec.structs.replace(CONFIG.fsdp, strategy=strategy)
    trainer = EmbodiedTrainer(settings_of(24, fsdp), world_size, rank)
    mine = [one for one in mixed() if one.env_rank == rank]
    metrics = dict(trainer.train(mine))
    state = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    save_result(folder, rank, {"metrics": metrics, "weights": state})


def settings_of(minibatch: int, fsdp: FSDPConfig) -> EmbodiedTrainerConfig:
    ppo = PPOConfig(epochs=2, minibatch_size=minibatch, normalize_advantage="batch", fused=False)
    return msgspec.structs.replace(CONFIG, ppo=ppo, fsdp=fsdp)


def mixed() -> list[Trajectory]:
    both = iteration(0)
    for one in both:
        one.version = one.version - one.env_rank
    return both


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_ranks_of_which_one_has_an_older_policys_share_train_like_one(
    tmp_path: Path, strategy: str
) -> None:
    results = in_processes(train_share, 2, tmp_path, strategy)
    alone = EmbodiedTrainer(settings_of(48, CONFIG.fsdp), 1, 0)
    metrics = alone.train(mixed())
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(results[0]["weights"][name], tensor, atol=1e-5, rtol=1e-4)
    for name in OF_CORRECTION:
        shares = [result["metrics"][name] for result in results]
        assert np.mean(shares) == pytest.approx(metrics[name], rel=1e-4)


def test_ranks_with_unequal_shares_are_told_so(tmp_path: Path) -> None:
    errors = in_processes(uneven, 2, tmp_path, 1)
    assert errors[0] == errors[1]
    assert "the number of samples differs between the ranks" in errors[0]


def test_no_samples_are_no_other_error_than_on_policy() -> None:
    manager = set_up(FSDP)
    batch = samples(0).take(torch.arange(0))
    found, metrics = corrected(manager, batch, PPOConfig())
    assert metrics == {}
    with pytest.raises(ValueError, match="the batch is empty"):
        ppo_epochs(manager, found, PPOConfig())


@pytest.mark.parametrize("unweighted", [{"proximal": "behaviour"}, {"off_policy": "none"}])
def test_a_cap_of_no_weights_is_refused(unweighted: dict[str, Any]) -> None:
    assert LossConfig(**unweighted).off_policy_cap == 2.0
    with pytest.raises(ValueError, match="no sample is weighted"):
        LossConfig(off_policy_cap=3.0, **unweighted)


@pytest.mark.parametrize("cap", [0.5, math.inf, math.nan])
def test_a_cap_that_makes_no_sense_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="off_policy_cap"):
        LossConfig(off_policy_cap=cap)
