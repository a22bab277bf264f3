from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.algorithms.config import LossConfig
from rlinf_async.algorithms.losses import LossInputs, LossOutput, ppo_loss, register_loss
from rlinf_async.backends.base import OptimizerConfig, TrainingDiverged
from rlinf_async.backends.fsdp.config import FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.ppo import (
    AutogradLoss,
    FlatBatch,
    FusedPpo,
    choose_gradient,
    ppo_epochs,
    standardized,
)
from rlinf_async.backends.policies.config import PolicyConfig
from tests.backends.fsdp_helpers import POLICY, samples, set_up

CONFIG = FSDPConfig(policy=POLICY, optimizer=OptimizerConfig(lr=1e-2))


def gradients(manager: FSDPModelManager) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in manager.model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(manager.model.parameters()))
    return found


def near(batch: FlatBatch, manager: FSDPModelManager, spread: float) -> FlatBatch:
    """The batch, with old log-probs and values near enough that both sides of each clip occur."""
    with torch.no_grad():
        now = manager.model(batch.observation, batch.action)
    return batch._replace(
        log_prob=now.log_prob + spread * batch.log_prob, value=now.value + spread * batch.value
    )


losses = st.builds(
    LossConfig,
    clip_low=st.sampled_from([0.1, 0.3]),
    clip_high=st.sampled_from([0.1, 0.4]),
    dual_clip=st.sampled_from([None, 1.2, 3.0]),
    value_clip=st.sampled_from([None, 0.1, 1.0]),
    value_coefficient=st.sampled_from([0.5, 1.0]),
    entropy_coefficient=st.sampled_from([0.0, 0.05]),
)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    loss=losses,
    share=st.sampled_from([1.0, 0.25]),
    hidden=st.sampled_from([(), (6,), (7, 6), (8, 5, 4)]),
)
def test_the_hand_written_gradient_equals_autograd(
    seed: int, loss: LossConfig, share: float, hidden: tuple[int, ...]
) -> None:
    policy = PolicyConfig(observation_size=5, action_size=3, hidden_sizes=hidden)
    ours, theirs = (set_up(FSDPConfig(policy=policy)) for _ in range(2))
    batch = near(samples(seed), ours, 0.3)
    metrics = FusedPpo(ours.model, loss)(batch, share)
    expected = AutogradLoss(theirs, loss)(batch, share)
    torch.testing.assert_close(metrics, expected, atol=1e-6, rtol=1e-5)
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, atol=1e-6, rtol=1e-5)


def test_the_hand_written_gradient_adds_to_what_is_there() -> None:
    once, twice = set_up(CONFIG), set_up(CONFIG)
    FusedPpo(once.model, LossConfig())(samples(0), 1.0)
    fused = FusedPpo(twice.model, LossConfig())
    fused(samples(0), 0.5)
    fused(samples(0), 0.5)
    for name, gradient in gradients(once).items():
        torch.testing.assert_close(gradients(twice)[name], gradient, atol=1e-6, rtol=1e-5)


def test_whole_iterations_agree_with_autograd() -> None:
    results = []
    for fused in (True, False):
        manager = set_up(CONFIG)
        config = PPOConfig(epochs=3, minibatch_size=5, fused=fused)
        batch = near(samples(1, 32), manager, 0.1)
        metrics = ppo_epochs(manager, batch, config, torch.Generator().manual_seed(5))
        results.append((metrics, manager.get_model_state_dict()))
    (metrics, state), (expected_metrics, expected) = results
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "ppo", "covered"),
    [
        ({}, {}, True),
        ({}, {"fused": False}, False),
        ({"precision": "bfloat16"}, {}, False),
        (
            {"policy": PolicyConfig(name="mlp_categorical", observation_size=5, action_size=3)},
            {},
            False,
        ),
    ],
)
def test_the_hand_written_gradient_is_used_only_where_it_is_right(
    fields: dict[str, Any], ppo: dict[str, Any], covered: bool
) -> None:
    manager = set_up(msgspec.structs.replace(CONFIG, **fields))
    gradient = choose_gradient(manager, PPOConfig(**ppo))
    assert isinstance(gradient, FusedPpo) is covered


@pytest.mark.parametrize("fused", [True, False])
def test_micro_batches_do_not_change_the_numbers(fused: bool) -> None:
    outcomes = []
    for micro in (None, 4, 8):
        manager = set_up(CONFIG)
        config = PPOConfig(epochs=2, minibatch_size=8, micro_batch_size=micro, fused=fused)
        outcomes.append(
            ppo_epochs(manager, samples(1, 20), config, torch.Generator().manual_seed(5))
        )
    assert outcomes[1] == pytest.approx(outcomes[0], abs=1e-5)
    assert outcomes[2] == pytest.approx(outcomes[0], abs=1e-5)


@pytest.mark.parametrize("micro", [None, 3])
def test_metrics_of_a_loss_are_means_over_samples_whatever_they_are_cut_into(
    micro: int | None,
) -> None:
    """Of 20 samples in minibatches of 6 the last has 2."""

    @register_loss(f"with_metrics_{micro}")
    def with_metrics(inputs: LossInputs, config: LossConfig) -> LossOutput:
        made = ppo_loss(inputs, config)
        return LossOutput(made.loss, {"of_returns": inputs.returns.mean(), "seven": 7.0})

    manager, batch = set_up(CONFIG), samples(1, 20)
    loss = LossConfig(name=f"with_metrics_{micro}")
    config = PPOConfig(epochs=2, minibatch_size=6, micro_batch_size=micro, loss=loss)
    found = ppo_epochs(manager, batch, config)
    assert list(found) == ["of_returns", "seven", "grad_norm", "lr", "updates", "skipped_updates"]
    assert found["of_returns"] == pytest.approx(float(batch.returns.mean()), abs=1e-6)
    assert found["seven"] == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("metrics", "target_kl", "said"),
    [
        (({"x": 1.0}, {}), None, r"returned the metrics \[\], and before \['x'\]"),
        (({"lr": 1.0},), None, "returned a metric 'lr', which an iteration has already"),
        (({"x": torch.zeros(2)},), None, r"returned \[2\] numbers as 'x': a metric is a single"),
        (({"x": 1.0},), 0.1, "target_kl is 0.1, but the loss returns no metric 'approx_kl'"),
    ],
)
def test_metrics_that_cannot_be_columns_are_errors(
    metrics: tuple[dict[str, Any], ...], target_kl: float | None, said: str
) -> None:
    name, left = f"with_{said}", list(metrics)

    @register_loss(name)
    def with_metrics(inputs: LossInputs, config: LossConfig) -> LossOutput:
        return LossOutput(ppo_loss(inputs, config).loss, left.pop(0) if len(left) > 1 else left[0])

    config = PPOConfig(epochs=1, minibatch_size=10, target_kl=target_kl, loss=LossConfig(name=name))
    with pytest.raises(ValueError, match=said):
        ppo_epochs(set_up(CONFIG), samples(0, 20), config)


def test_every_sample_is_used_once_an_epoch() -> None:
    manager = set_up(CONFIG)
    seen: list[float] = []

    class Recorder(AutogradLoss):
        def __call__(self, batch: FlatBatch, share: float) -> torch.Tensor:
            seen.extend(batch.returns.tolist())
            return super().__call__(batch, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rlinf_async.backends.fsdp.ppo.choose_gradient",
            lambda manager, config, masked: Recorder(manager, config.loss),
        )
        batch = samples(0, 10)
        metrics = ppo_epochs(manager, batch, PPOConfig(epochs=2, minibatch_size=4))
    assert metrics["updates"] == 6
    assert sorted(seen[:10]) == sorted(batch.returns.tolist()) == sorted(seen[10:])
    assert seen[:10] != seen[10:]


def test_training_makes_good_actions_likelier_and_values_right() -> None:
    manager = set_up(CONFIG)
    observation, action = samples(0, 64).vectors, samples(0, 64).action
    with torch.no_grad():
        before = manager.model(observation, action)
    good = action[:, 0] > 0
    batch = FlatBatch(
        observation,
        action,
        before.log_prob,
        before.value,
        torch.where(good, 1.0, -1.0),
        observation[:, 0],
    )
    metrics = ppo_epochs(manager, batch, PPOConfig(epochs=20, minibatch_size=16))
    with torch.no_grad():
        after = manager.model(observation, action)
    rise = after.log_prob - before.log_prob
    assert rise[good].mean() > rise[~good].mean()
    assert (after.value - batch.returns).square().mean() < 0.1
    assert metrics["updates"] == 80
    assert metrics["skipped_updates"] == 0


def test_the_target_kl_stops_after_the_epoch_that_passed_it() -> None:
    manager = set_up(CONFIG)
    batch = near(samples(0, 64), manager, 0.0)
    metrics = ppo_epochs(manager, batch, PPOConfig(epochs=50, minibatch_size=16, target_kl=1e-4))
    assert metrics["updates"] % 4 == 0
    assert metrics["updates"] < 200


@pytest.mark.parametrize("fused", [True, False])
def test_an_iteration_without_any_finite_update_is_an_error(fused: bool) -> None:
    manager = set_up(CONFIG)
    batch = samples(0)
    batch.vectors.fill_(math.nan)
    with pytest.raises(TrainingDiverged, match="all 2 updates of this iteration"):
        ppo_epochs(manager, batch, PPOConfig(epochs=1, minibatch_size=6, fused=fused))


def test_one_poisoned_sample_skips_one_update_and_is_counted() -> None:
    manager = set_up(CONFIG)
    batch = samples(0)
    batch.returns[3] = math.nan
    metrics = ppo_epochs(manager, batch, PPOConfig(epochs=1, minibatch_size=6))
    assert metrics["skipped_updates"] == 1
    assert math.isfinite(metrics["grad_norm"])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch is empty"):
        ppo_epochs(set_up(CONFIG), samples(0, 0), PPOConfig())


def test_standardized_advantages_have_mean_zero_and_deviation_one() -> None:
    result = standardized(3.0 + 5.0 * torch.randn(50))
    assert result.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert result.std().item() == pytest.approx(1.0, abs=1e-5)
    assert standardized(torch.tensor([4.0])).tolist() == [4.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"minibatch_size": 0}, "minibatch_size is 0"),
        ({"minibatch_size": 10, "micro_batch_size": 4}, "must divide minibatch_size 10"),
        ({"target_kl": 0.0}, r"target_kl is 0\.0"),
    ],
)
def test_a_batch_size_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**fields)
