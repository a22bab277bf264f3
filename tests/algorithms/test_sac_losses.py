"""The losses of soft actor-critic against numbers computed by hand, and against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.autograd import grad
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from rlinf_async.algorithms.losses import (
    critic_loss,
    entropy_coefficient_loss,
    policy_loss,
    polyak_update,
    soft_target,
    squashed_log_prob,
)


def test_log_probs_are_those_of_torchs_transformed_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, noise = torch.randn(2, 64, 3, generator=generator, dtype=torch.float64)
    log_std = torch.randn(64, 3, generator=generator, dtype=torch.float64) - 1.0
    unsquashed = mean + noise * log_std.exp()
    squashed = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    expected: Tensor = squashed.log_prob(unsquashed.tanh()).sum(-1)  # type: ignore[no-untyped-call]
    inside = unsquashed.abs().amax(-1) < 8.0  # beyond, torch's own loses digits
    found = squashed_log_prob(noise, log_std, unsquashed)
    torch.testing.assert_close(found[inside], expected[inside], rtol=1e-6, atol=1e-6)


def test_log_probs_and_their_gradients_are_finite_at_the_bounds() -> None:
    unsquashed = tensor([[-60.0], [60.0]], requires_grad=True)
    found = squashed_log_prob(torch.zeros(2, 1), torch.zeros(2, 1), unsquashed)
    (gradient,) = grad(found.sum(), unsquashed)
    assert torch.isfinite(found).all()
    # log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there
    expected = 120.0 - 2.0 * math.log(2.0) - 0.5 * math.log(2.0 * math.pi)
    torch.testing.assert_close(found, tensor([expected, expected]))
    assert torch.isfinite(gradient).all()


def test_the_target_takes_the_smaller_critic_and_nothing_after_a_termination() -> None:
    found = soft_target(
        reward=tensor([1.0, 1.0]),
        discount=tensor([0.9, 0.0]),
        next_values=tensor([[2.0, 5.0], [3.0, 4.0]]),
        next_log_prob=tensor([-1.0, -1.0]),
        entropy_coefficient=tensor(0.5),
    )
    torch.testing.assert_close(found, tensor([1.0 + 0.9 * (2.0 + 0.5), 1.0]))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, 0.5 * (1.0 + 4.0) / 2 + 0.5 * (0.0 + 9.0) / 2),
        (tensor([1.0, 0.5]), 0.5 * (1.0 + 2.0) / 2 + 0.5 * (0.0 + 4.5) / 2),
    ],
)
def test_the_critics_loss_is_half_the_mean_squared_error_of_each(
    weight: Tensor | None, expected: float
) -> None:
    values, target = tensor([[1.0, 2.0], [2.0, 1.0]]), tensor([2.0, 4.0])
    assert critic_loss(values, target, weight).item() == pytest.approx(expected)


def test_the_policys_loss_weighs_entropy_against_the_smaller_critic() -> None:
    found = policy_loss(tensor([1.0, -1.0]), tensor([[3.0, 1.0], [2.0, 4.0]]), tensor(0.2))
    assert found.item() == pytest.approx(((0.2 - 2.0) + (-0.2 - 1.0)) / 2)


@pytest.mark.parametrize(("log_prob", "grows"), [(3.0, True), (-3.0, False)])
def test_the_coefficient_grows_where_the_entropy_is_below_its_target(
    log_prob: float, grows: bool
) -> None:
    logarithm = tensor(0.0, requires_grad=True)
    loss = entropy_coefficient_loss(logarithm, tensor([log_prob]), target_entropy=-1.0)
    (gradient,) = grad(loss.sum(), logarithm)
    # the entropy is -log_prob; gradient descent raises the logarithm where the gradient is < 0
    assert (gradient.item() < 0.0) is grows
    assert gradient.item() == pytest.approx(-(log_prob - 1.0))


def test_targets_move_by_their_share() -> None:
    targets = [tensor([0.0, 4.0]), tensor(1.0)]
    polyak_update(targets, [tensor([1.0, 0.0]), tensor(2.0)], tau=0.25)
    torch.testing.assert_close(targets[0], tensor([0.25, 3.0]))
    torch.testing.assert_close(targets[1], tensor(1.25))
