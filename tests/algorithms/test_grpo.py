from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlinf_async.algorithms.advantages import AdvantageInputs, compute_advantages
from rlinf_async.algorithms.config import AdvantageConfig


def inputs(reward: Any, valid: Any = None) -> AdvantageInputs:
    given = np.array(reward, np.float32)
    none = np.zeros(given.shape, bool)
    return AdvantageInputs(
        reward=given,
        value=np.zeros((len(given) + 1, *given.shape[1:]), np.float32),
        terminated=none,
        truncated=none,
        final_value=np.zeros(given.shape, np.float32),
        valid=None if valid is None else np.array(valid, bool),
    )


def test_episodes_are_compared_with_those_of_their_group() -> None:
    config = AdvantageConfig(name="grpo", group_size=2)
    made = compute_advantages(inputs([[1, 0, 5, 5], [2, 1, 0, 0]]), config)
    assert np.allclose(made.advantage, [[1, -1, 0, 0], [1, -1, 0, 0]], atol=1e-4)


def test_what_comes_after_an_episode_does_not_count() -> None:
    config = AdvantageConfig(name="grpo", group_size=2)
    valid = [[1, 1], [0, 1]]
    made = compute_advantages(inputs([[1, 0], [100, 0]], valid), config)
    assert np.allclose(made.advantage[0], [1, -1], atol=1e-4)


def test_the_value_function_stays_as_it_is() -> None:
    config = AdvantageConfig(name="grpo", group_size=2)
    given = inputs([[1, 0]])._replace(value=np.array([[3, 4], [9, 9]], np.float32))
    assert compute_advantages(given, config).returns.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("size", [1, 3])
def test_groups_that_are_not_whole_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"env\.group_size must be at least 2"):
        compute_advantages(inputs([[1, 0]]), AdvantageConfig(name="grpo", group_size=size))
