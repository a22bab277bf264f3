"""The hand-written gradient of soft actor-critic against autograd's."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_async.backends.base import OffloadedError
from rlinf_async.backends.fsdp.sac import SacBatch, SacModel, SacTrainer, fused_sac
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.sac_config import (
    SacLossConfig,
    SacOptimizerConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from tests.backends.test_sac_trainer import POLICY, batch, parameters


def model_of(policy: PolicyConfig, sac: SacLossConfig) -> SacModel:
    """A model of float64, so that a formula that is wrong is told from rounding; logs of deviations
    are beyond both limits for some actions, and the targets are others than the critics."""
    model = SacModel(policy, sac).double()
    with torch.no_grad():
        for target in model.target.parameters():
            target.add_(0.1 * torch.randn_like(target))
        last = model.policy.actor[-1].bias
        last[policy.action_size :] += torch.empty(policy.action_size).uniform_(-26.0, 6.0)
        if sac.entropy_coefficient is None:
            model.log_entropy_coefficient.add_(torch.randn(1))
    for one in model.parameters():
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    return model


def drawn(policy: PolicyConfig, size: int, *, trains_policy: bool) -> SacBatch:
    def normal(*shape: int) -> Tensor:
        return torch.randn(size, *shape, dtype=torch.float64)

    seen, actions = policy.observation_size, policy.action_size
    discount = torch.where(torch.rand(size) < 0.3, 0.0, 0.97).double()
    return SacBatch(
        normal(seen),
        normal(seen),
        normal(actions).tanh(),
        normal(),
        discount,
        normal().exp(),
        normal(actions),
        normal(actions),
        trains_policy=trains_policy,
    )


def gradients(model: SacModel) -> dict[str, Tensor]:
    """The gradients, which are others from here on, as after a `GradientBuffer` was dropped."""
    found = {}
    for name, one in model.named_parameters():
        if one.grad is not None:
            found[name], one.grad = one.grad, torch.zeros_like(one)
    return found


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 1000),
    seen=st.integers(1, 20),
    actions=st.integers(1, 6),
    hidden=st.lists(st.integers(1, 9), max_size=3),
    critics=st.integers(1, 3),
    fixed=st.sampled_from([None, 0.0, 0.3]),
    sizes=st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=3),
    agree=st.booleans(),
)
def test_losses_and_gradients_are_those_of_autograd(
    seed: int,
    seen: int,
    actions: int,
    hidden: list[int],
    critics: int,
    fixed: float | None,
    sizes: list[tuple[int, bool]],
    agree: bool,
) -> None:
    torch.manual_seed(seed)
    policy = PolicyConfig(
        name="mlp_squashed_gaussian",
        observation_size=seen,
        action_size=actions,
        hidden_sizes=tuple(hidden),
    )
    model = model_of(policy, SacLossConfig(entropy_coefficient=fixed, critics=critics))
    if agree:
        for one in model.critic.parameters():
            one.data.copy_(one.data[:1].expand_as(one))
    fused = model.by_hand()
    for size, trains_policy in sizes:
        transitions = drawn(policy, size, trains_policy=trains_policy)
        error, value, metrics = fused(transitions)
        mine = gradients(model)
        wanted = model(transitions)
        torch.autograd.backward(wanted.total)
        for found, one in zip((error, value, metrics), wanted[1:], strict=True):
            torch.testing.assert_close(found.float(), one, rtol=1e-6, atol=1e-6, equal_nan=True)
        for name, gradient in gradients(model).items():
            # torch's softplus is cut off at 20: near a bound of actions autograd is off by e^-20.
            limit = 1e-9 + 1e-6 * float(gradient.abs().max())
            torch.testing.assert_close(mine[name], gradient, rtol=0.0, atol=limit, msg=name)


def trainer(sac: SacLossConfig, **sharding: Any) -> SacTrainer:
    optimizer = SacOptimizerConfig(lr=1e-3, value_lr=3e-3, eps=1e-4)
    fsdp = SacShardingConfig(optimizer=optimizer, **sharding)
    return SacTrainer(SacTrainerConfig(sac=sac, fsdp=fsdp), POLICY)


@pytest.mark.parametrize("sac", [{}, {"policy_every": 2}, {"entropy_coefficient": 0.1}])
def test_updates_are_those_of_autograd(sac: dict[str, Any]) -> None:
    ours, theirs = (trainer(SacLossConfig(fused=fused, **sac)) for fused in (True, False))
    for number in range(10):
        transitions = batch(number, weight=0.5 + number)
        found, wanted = ours.step(transitions), theirs.step(transitions)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(found.error, wanted.error, rtol=1e-5, atol=1e-5)
    for name, value in parameters(theirs).items():
        torch.testing.assert_close(parameters(ours)[name], value, rtol=1e-5, atol=1e-5)


def test_it_goes_on_with_the_weights_that_there_are(tmp_path: Path) -> None:
    """After a checkpoint was read, the model was moved, and the optimizer began anew."""
    ours, theirs = (trainer(SacLossConfig(fused=fused)) for fused in (True, False))
    for one, name in ((ours, "ours"), (theirs, "theirs")):
        one.step(batch())
        one.save_checkpoint(tmp_path / name)
        one.step(batch(1))
        one.load_checkpoint(tmp_path / name)
        one.step(batch(2))
        one.manager.offload_param_and_grad()
        one.manager.offload_optimizer()
        with pytest.raises(OffloadedError):
            one.step(batch(3))
        one.manager.load_param_and_grad()
        one.manager.load_optimizer()
        one.step(batch(3))
        one.manager.restart_optimizer()
        one.step(batch(4))
    for name, value in parameters(theirs).items():
        torch.testing.assert_close(parameters(ours)[name], value, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_is_skipped_as_with_autograd(caplog: pytest.LogCaptureFixture) -> None:
    one, transitions = trainer(SacLossConfig()), batch()
    before = parameters(one)
    transitions.reward[3] = math.inf
    with caplog.at_level(logging.WARNING):
        assert not math.isfinite(one.step(transitions).metrics["grad_norm"])
    assert "this optimizer step is skipped" in caplog.text
    before["policy.uniform"].fill_(False)
    for name, value in parameters(one).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert math.isfinite(one.step(batch()).metrics["grad_norm"])


@pytest.mark.parametrize(
    ("sac", "sharding", "covered"),
    [
        ({}, {}, True),
        ({"policy_every": 2, "critics": 4}, {}, True),
        ({"fused": False}, {}, False),
        ({"critic_layer_norm": True}, {}, False),
        ({"target_critics": 1}, {}, False),
        ({"cloning": 0.5}, {}, False),
        ({}, {"precision": "bfloat16"}, False),
    ],
)
def test_it_is_used_only_where_it_is_right(
    sac: dict[str, Any], sharding: dict[str, Any], covered: bool
) -> None:
    one = trainer(SacLossConfig(**sac), **sharding)
    assert (fused_sac(one.manager, one.losses) is not None) is covered
