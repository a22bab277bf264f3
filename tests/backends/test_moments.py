from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.backends.policies.moments import (
    ObservationNormalizer,
    ReturnNormalizer,
    RunningMoments,
    discounted_returns,
)


@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_merged_batches_have_the_moments_of_all_samples_together(
    seed: int, sizes: list[int]
) -> None:
    draw = np.random.default_rng(seed)
    batches = [draw.normal(5.0, 3.0, (size, 2)) for size in sizes]
    moments = RunningMoments(2)
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    together = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean.numpy(), together.mean(0), rtol=1e-10)
    np.testing.assert_allclose(moments.variance.numpy(), together.var(0), rtol=1e-9, atol=1e-12)
    assert moments.count.item() == len(together)


def test_before_the_first_update_normalising_changes_nothing() -> None:
    observation = torch.randn(3, 2).clamp(-5, 5)
    assert torch.allclose(ObservationNormalizer(2, 10.0)(observation), observation)


def test_what_is_not_normalised_is_not_computed_with() -> None:
    normalizer, observation = ObservationNormalizer(2, math.inf), torch.randn(3, 2)
    array = observation.numpy()
    assert normalizer(observation) is observation
    assert normalizer.of_array(array) is array
    normalizer.update(torch.tensor([[0.0, 1.0], [8.0, 1.0]]))
    expected = (array - np.array([4.0, 1.0])) / np.sqrt(np.array([16.0, 0.0]) + 1e-8)
    np.testing.assert_allclose(normalizer(observation).numpy(), expected, rtol=1e-4)
    np.testing.assert_allclose(normalizer.of_array(array), expected, rtol=1e-4)


def test_normalised_observations_are_held_within_the_clip() -> None:
    normalizer = ObservationNormalizer(1, 2.0)
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    result = normalizer(torch.tensor([[1.0], [2.0], [100.0], [-100.0]]))
    assert result.flatten().tolist() == pytest.approx([0.0, 1.0, 2.0, -2.0])


def test_normalising_leaves_the_observation_as_it_was() -> None:
    normalizer = ObservationNormalizer(2, 10.0)
    normalizer.update(torch.randn(5, 2))
    observation = torch.ones(1, 2)
    normalizer(observation)
    assert observation.tolist() == [[1.0, 1.0]]


def test_a_batch_with_nan_is_refused_and_changes_nothing() -> None:
    moments = RunningMoments(1)
    with pytest.raises(ValueError, match="NaN or infinity cannot enter"):
        moments.update(torch.tensor([[1.0], [float("nan")]]))
    assert moments.count.item() == 0


def test_an_empty_batch_changes_nothing() -> None:
    moments = RunningMoments(2)
    moments.update(torch.zeros(0, 2))
    assert moments.mean.tolist() == [0.0, 0.0]
    assert moments.variance.tolist() == [1.0, 1.0]


def test_the_statistics_travel_with_the_state_dict() -> None:
    source, target = ReturnNormalizer(), ReturnNormalizer()
    source.update(torch.tensor([1.0, 3.0]))
    target.load_state_dict(source.state_dict())
    reward = np.array([2.0], np.float32)
    assert target.normalize(reward) == source.normalize(reward) == pytest.approx(2.0)


def test_rewards_are_scaled_but_not_shifted() -> None:
    normalizer = ReturnNormalizer(clip=10.0)
    normalizer.update(torch.tensor([98.0, 102.0]))
    reward = np.array([[4.0, -4.0, 1000.0]], np.float32)
    assert normalizer.normalize(reward).tolist() == [pytest.approx([2.0, -2.0, 10.0])]


@given(seed=st.integers(0, 1000), steps=st.integers(1, 10), gamma=st.floats(0, 1))
def test_discounted_returns_equal_the_backward_looking_sum(
    seed: int, steps: int, gamma: float
) -> None:
    draw = np.random.default_rng(seed)
    reward = draw.normal(size=(steps, 2)).astype(np.float32)
    ended = draw.random((steps, 2)) < 0.3
    carry = draw.normal(size=2).astype(np.float32)
    returns, after = discounted_returns(reward, ended, carry, gamma)
    for env in range(2):
        running = float(carry[env])
        for step in range(steps):
            running = gamma * running + float(reward[step, env])
            assert returns[step, env] == pytest.approx(running, abs=1e-4)
            running = 0.0 if ended[step, env] else running
        assert after[env] == pytest.approx(running, abs=1e-4)


def test_what_it_computes_with_follows_every_change_also_of_a_copy() -> None:
    normalizer, observation = ObservationNormalizer(1, 10.0), torch.tensor([[6.0]])
    assert normalizer(observation).item() == pytest.approx(6.0)
    normalizer.update(torch.tensor([[0.0], [8.0]]))
    assert normalizer(observation).item() == pytest.approx(0.5)
    copied = copy.deepcopy(normalizer)
    for _ in range(4):  # any number of changes
        copied.mean.copy_(torch.tensor([2.0]))
        copied.variance.copy_(torch.tensor([4.0]))
        assert copy.deepcopy(copied)(observation).item() == pytest.approx(2.0)
    assert copied(observation).item() == pytest.approx(2.0)
    assert normalizer(observation).item() == pytest.approx(0.5)
    normalizer.load_state_dict(copied.state_dict())
    assert normalizer(observation).item() == pytest.approx(2.0)
    normalizer.to(torch.float64)
    normalizer.mean = torch.tensor([5.0], dtype=torch.float64)
    assert normalizer(observation).item() == pytest.approx(0.5)
