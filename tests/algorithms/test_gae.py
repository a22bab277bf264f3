from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    compute_advantages,
)
from rlinf_async.algorithms.config import AdvantageConfig


def collected(seed: int, steps: int, envs: int, end_rate: float = 0.3) -> AdvantageInputs:
    draw = np.random.default_rng(seed)
    terminated = draw.random((steps, envs)) < end_rate
    truncated = draw.random((steps, envs)) < end_rate
    return AdvantageInputs(
        reward=draw.normal(size=(steps, envs)).astype(np.float32),
        value=draw.normal(size=(steps + 1, envs)).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        final_value=(draw.normal(size=(steps, envs)) * truncated).astype(np.float32),
    )


def advantage_of_one_step(
    inputs: AdvantageInputs, gamma: float, lam: float, start: int, env: int
) -> float:
    """The forward sum of equation 16, one step after the other, straight from the paper."""
    total, weight = 0.0, 1.0
    for step in range(start, len(inputs.reward)):
        follows = float(inputs.value[step + 1, env])
        if inputs.truncated[step, env]:
            follows = float(inputs.final_value[step, env])
        if inputs.terminated[step, env]:
            follows = 0.0
        reward, value = float(inputs.reward[step, env]), float(inputs.value[step, env])
        total += weight * (reward + gamma * follows - value)
        if inputs.terminated[step, env] or inputs.truncated[step, env]:
            break
        weight *= gamma * lam
    return total


@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 12),
    envs=st.integers(1, 4),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_equals_the_forward_sum_of_the_paper(
    seed: int, steps: int, envs: int, gamma: float, lam: float
) -> None:
    inputs = collected(seed, steps, envs)
    result = compute_advantages(inputs, AdvantageConfig(gamma=gamma, gae_lambda=lam))
    expected = [
        [advantage_of_one_step(inputs, gamma, lam, step, env) for env in range(envs)]
        for step in range(steps)
    ]
    np.testing.assert_allclose(result.advantage, expected, atol=2e-5)
    np.testing.assert_allclose(result.returns, expected + inputs.value[:-1], atol=2e-5)
    assert result.advantage.dtype == result.returns.dtype == np.float32


def one_step(*, terminated: bool, truncated: bool) -> Advantages:
    inputs = AdvantageInputs(
        reward=np.ones((1, 1), np.float32),
        value=np.array([[2.0], [100.0]], np.float32),
        terminated=np.array([[terminated]]),
        truncated=np.array([[truncated]]),
        final_value=np.full((1, 1), 10.0, np.float32),
    )
    return compute_advantages(inputs, AdvantageConfig(gamma=0.5, gae_lambda=1.0))


def test_a_truncated_step_bootstraps_with_the_value_it_was_cut_at() -> None:
    assert one_step(terminated=False, truncated=True).returns.item() == 1 + 0.5 * 10


def test_a_terminated_step_bootstraps_with_nothing() -> None:
    assert one_step(terminated=True, truncated=False).returns.item() == 1


def test_a_step_that_is_both_counts_as_terminated() -> None:
    assert one_step(terminated=True, truncated=True).returns.item() == 1


def test_a_running_episode_bootstraps_with_the_last_value() -> None:
    assert one_step(terminated=False, truncated=False).returns.item() == 1 + 0.5 * 100


def test_a_missing_bootstrap_row_is_named() -> None:
    inputs = collected(0, 4, 2)
    with pytest.raises(ValueError, match=r"value has shape \(4, 2\).*must be \(5, 2\)"):
        compute_advantages(inputs._replace(value=inputs.value[:-1]), AdvantageConfig())
