from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_async.algorithms.config import LossConfig
from rlinf_async.algorithms.losses import (
    LossInputs,
    approximate_kl,
    clipped_policy_loss,
    ppo_loss,
    value_loss,
)


def drawn(seed: int, size: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(7)]
    return LossInputs(*columns)


def policy_term(log_prob: float, old: float, advantage: float, config: LossConfig) -> float:
    """The surrogate of one sample, by cases instead of by min and max."""
    ratio = math.exp(log_prob - old)
    if advantage >= 0:
        return -advantage * min(ratio, 1 + config.clip_high)
    held = max(ratio, 1 - config.clip_low)
    if config.dual_clip is not None:
        held = min(held, config.dual_clip)
    return -advantage * held


def value_term(value: float, old: float, target: float, clip: float | None) -> float:
    error = (value - target) ** 2
    if clip is None:
        return 0.5 * error
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max(error, (near - target) ** 2)


configs = st.builds(
    LossConfig,
    clip_low=st.floats(0.05, 0.9),
    clip_high=st.floats(0.05, 2.0),
    dual_clip=st.none() | st.floats(1.5, 5.0),
    value_clip=st.none() | st.floats(0.05, 2.0),
    value_coefficient=st.floats(0, 2),
    entropy_coefficient=st.floats(0, 0.1),
)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 20), config=configs)
def test_the_loss_equals_plain_arithmetic(seed: int, size: int, config: LossConfig) -> None:
    inputs = drawn(seed, size)
    rows = [tuple(float(column[row]) for column in inputs[:7]) for row in range(size)]
    policy = sum(policy_term(row[0], row[3], row[5], config) for row in rows) / size
    value = sum(value_term(row[2], row[4], row[6], config.value_clip) for row in rows) / size
    entropy = sum(row[1] for row in rows) / size
    output = ppo_loss(inputs, config)
    expected = policy + config.value_coefficient * value - config.entropy_coefficient * entropy
    assert float(output.loss) == pytest.approx(expected, abs=1e-9)
    assert float(output.metrics["policy_loss"]) == pytest.approx(policy, abs=1e-9)
    assert float(output.metrics["value_loss"]) == pytest.approx(value, abs=1e-9)
    assert float(output.metrics["entropy"]) == pytest.approx(entropy, abs=1e-9)


@given(seed=st.integers(0, 1000))
def test_the_kl_estimate_is_never_negative_and_zero_at_home(seed: int) -> None:
    log_ratio = drawn(seed, 8).log_prob
    assert approximate_kl(log_ratio) >= 0
    assert approximate_kl(torch.zeros(4)) == 0
    expected = sum(math.exp(float(x)) - 1 - float(x) for x in log_ratio) / 8
    assert float(approximate_kl(log_ratio)) == pytest.approx(expected, abs=1e-9)


def ratios(*wanted: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(wanted).log().requires_grad_(), torch.zeros(len(wanted))


def test_the_clip_fraction_counts_the_ratios_outside_the_range() -> None:
    log_prob, old = ratios(0.5, 1.0, 1.1, 1.5)
    result = clipped_policy_loss(log_prob, old, torch.ones(4), LossConfig())
    assert float(result.clip_fraction) == 0.5


def test_no_gradient_pushes_a_ratio_further_out_of_the_range() -> None:
    log_prob, old = ratios(1.5, 0.5)
    loss = clipped_policy_loss(log_prob, old, torch.tensor([1.0, -1.0]), LossConfig()).loss
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.tolist() == [0.0, 0.0]


def test_a_gradient_pulls_a_ratio_back_into_the_range() -> None:
    log_prob, old = ratios(1.5, 0.5)
    loss = clipped_policy_loss(log_prob, old, torch.tensor([-1.0, 1.0]), LossConfig()).loss
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.tolist() == pytest.approx([0.75, -0.25])


def test_the_dual_clip_bounds_the_loss_of_a_bad_action_that_became_likely() -> None:
    log_prob, old = ratios(50.0)
    config = LossConfig(dual_clip=3.0)
    result = clipped_policy_loss(log_prob, old, torch.tensor([-1.0]), config)
    assert float(result.loss.detach()) == 3.0


def test_the_value_loss_is_half_the_squared_error() -> None:
    assert float(value_loss(torch.tensor([3.0]), torch.zeros(1), torch.tensor([1.0]))) == 2.0
