"""Windows of recorded episodes, against what stands in them."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_async.backends.world_model.config import WorldModelInfo
from rlinf_async.backends.world_model.recorded import Recorded, as_input
from rlinf_async.data.demonstrations import DemonstratedEpisode, Outcome
from rlinf_async.messages.spaces import ActionSpec, Factor, ObservationPart, ObservationSpec

STATE = ObservationSpec((ObservationPart(name="state", kind="state", shape=(1,)),))


def episode(first: float, steps: int, *, terminated: bool) -> DemonstratedEpisode:
    """Shows ``first``, ``first + 1``, ...; pays ten times what it shows next."""
    shown = first + np.arange(steps + 1, dtype=np.float32)[:, None]
    outcome = Outcome(10.0 * shown[1:, 0], shown[-1:], terminated)
    return DemonstratedEpisode(shown[:-1], 100.0 * shown[:-1], outcome)


@pytest.fixture
def recorded() -> Recorded:
    episodes = [episode(0.0, 3, terminated=True), episode(20.0, 2, terminated=False)]
    return Recorded(episodes, [one.action for one in episodes])


def test_a_window_is_what_followed_and_is_masked_after_the_end(recorded: Recorded) -> None:
    window = recorded.windows(np.array([0, 0, 1]), np.array([0, 2, 0]), 3, np.array([0, 1, 3]))
    assert window.first[:, 0].tolist() == [0.0, 2.0, 20.0]
    assert window.there.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert window.action[0, :, 0].tolist() == [0.0, 100.0, 200.0]
    assert window.action[1, 0, 0] == 200.0
    assert window.reward[0].tolist() == [10.0, 20.0, 30.0]
    assert window.reward[2, :2].tolist() == [210.0, 220.0]
    assert window.terminated.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]  # the second was cut
    assert window.seen.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert window.shown[0, :, 0].tolist() == [0.0, 1.0, 3.0]
    assert window.shown[1, :2, 0].tolist() == [2.0, 3.0]
    assert window.shown[2, :2, 0].tolist() == [20.0, 21.0]


def test_episodes_begin_where_recorded_ones_did_or_went_on(recorded: Recorded) -> None:
    starts, first = recorded.starts(np.random.default_rng(0), 10)
    assert sorted(starts[first][:, 0].tolist()) == [0.0, 20.0]
    assert sorted(starts[~first][:, 0].tolist()) == [1.0, 2.0, 21.0]  # never the last
    few, of_these = recorded.starts(np.random.default_rng(0), 3)
    assert len(few) == 3
    assert of_these.sum() == 2


def test_half_of_the_windows_begin_with_their_episode(recorded: Recorded) -> None:
    episodes, start = recorded.draw(np.random.default_rng(0), 200)
    assert not start[::2].any()
    assert (start < recorded.lengths[episodes]).all()
    assert set(zip(episodes[1::2].tolist(), start[1::2].tolist(), strict=True)) == {
        *((0, step) for step in range(3)),
        *((1, step) for step in range(2)),
    }


def test_actions_are_numbers_in_their_bounds_or_one_of_the_choices() -> None:
    box = WorldModelInfo(env="", observation=STATE, action=ActionSpec((Factor("continuous", 2),)))
    bounds = ((0.0, 4.0), (-np.inf, np.inf))
    found = as_input(np.array([[0.0, 7.0], [3.0, -7.0]]), box, bounds)
    assert found.tolist() == [[-1.0, 7.0], [0.5, -7.0]]
    choices = WorldModelInfo(env="", observation=STATE, action=ActionSpec((Factor("choice", 3),)))
    assert as_input(np.array([2, 0]), choices, ()).tolist() == [[0, 0, 1], [1, 0, 0]]
