"""Transitions, the store that they lie in, and drawing from it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from rlinf_async.messages.embodied import Trajectory
from rlinf_async.messages.spaces import continuous, flat_spec
from rlinf_async.workers.replay.columns import ReplayError, columns_of
from rlinf_async.workers.replay.store import (
    Priorities,
    ReplayStore,
    SumTree,
    transitions_of,
)
from rlinf_async.workers.replay.worker import ReplayConfig

COLUMNS = columns_of(flat_spec(1), continuous(1))


def trajectory() -> Trajectory:
    """Two envs, four steps. Rewards are 1, 2, 4, 8 in both.

    The first env is terminated at step 1, the second truncated at step 2. Observations are 10 times
    the step, and 100 more in the second env; those after the last step are -1.
    """
    steps = np.arange(4, dtype=np.float32)
    terminated, truncated = np.zeros((2, 4, 2), np.bool_)
    terminated[1, 0] = truncated[2, 1] = True
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=0,
        observation=np.stack([10 * steps, 100 + 10 * steps], 1)[..., None],
        action=np.zeros((4, 2, 1), np.float32),
        log_prob=np.zeros((4, 2), np.float32),
        value=np.zeros((5, 2), np.float32),
        reward=np.repeat(2.0**steps, 2).reshape(4, 2).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        final_value=np.zeros((4, 2), np.float32),
        version=np.array([3, 3, 4, 4]),
        last_observation=np.full((2, 1), -1.0, np.float32),
        final_observation=np.full((1, 1), 777.0, np.float32),
    )


def test_single_steps_bootstrap_at_a_truncation_with_its_own_last_observation() -> None:
    made = transitions_of(trajectory(), n_step=1, gamma=0.5)
    assert made.observation[:, 0].tolist() == [0, 100, 10, 110, 20, 120, 30, 130]
    assert made.reward.tolist() == [1, 1, 2, 2, 4, 4, 8, 8]
    assert made.discount.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    following = made.next_observation[:, 0].tolist()
    assert [value for value, share in zip(following, made.discount, strict=True) if share] == [
        10, 110, 120, 30, 777, -1, -1,
    ]  # fmt: skip
    assert made.version.tolist() == [3, 3, 3, 3, 4, 4, 4, 4]


def test_n_step_returns_stop_where_an_episode_or_the_trajectory_ends() -> None:
    made = transitions_of(trajectory(), n_step=3, gamma=0.5)
    first, second = slice(0, None, 2), slice(1, None, 2)
    # terminated at step 1: 1 + 0.5 * 2, 2; then 4 + 0.5 * 8 and 8 up to the trajectory's end
    assert made.reward[first].tolist() == [2.0, 2.0, 8.0, 8.0]
    assert made.discount[first].tolist() == [0.0, 0.0, 0.25, 0.5]
    assert made.next_observation[first, 0].tolist()[2:] == [-1.0, -1.0]
    # truncated at step 2: 1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4; then 8
    assert made.reward[second].tolist() == [3.0, 4.0, 4.0, 8.0]
    assert made.discount[second].tolist() == [0.125, 0.25, 0.5, 0.5]
    assert made.next_observation[second, 0].tolist() == [777.0, 777.0, 777.0, -1.0]


def test_steps_that_only_begin_an_episode_are_no_transitions() -> None:
    one = trajectory()
    one.valid = np.ones((4, 2), np.bool_)
    one.valid[2, 0] = False
    made = transitions_of(one, n_step=2, gamma=0.5)
    assert made.observation[:, 0].tolist() == [0, 100, 10, 110, 120, 30, 130]


def test_a_trajectory_without_next_observations_is_refused() -> None:
    one = trajectory()
    one.last_observation = None
    with pytest.raises(ValueError, match="ask for transitions"):
        transitions_of(one, n_step=1, gamma=0.5)


def put(store: ReplayStore, *rewards: float) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    count = len(rewards)
    numbers = store.write({"reward": np.array(rewards, np.float32)})
    store.count += count
    return numbers


def test_the_oldest_make_room_and_spare_slots_keep_them_a_while_longer() -> None:
    store = ReplayStore(COLUMNS, capacity=3, spare=2)
    put(store, 0, 1, 2, 3, 4)
    assert (len(store), store.first) == (3, 2)
    assert store.take(store.numbers)["reward"].tolist() == [2, 3, 4]
    assert store.take(np.array([0, 1]))["reward"].tolist() == [0, 1]  # not overwritten yet
    put(store, 5)
    assert store.take(store.numbers)["reward"].tolist() == [3, 4, 5]


def test_files_hold_what_was_written_and_those_of_another_layout_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    store = ReplayStore(COLUMNS, capacity=4, folder=tmp_path / "store")
    put(store, 1, 2)
    again = ReplayStore(COLUMNS, capacity=4, folder=tmp_path / "store", fresh=False)
    again.count = 2
    assert again.take(again.numbers)["reward"].tolist() == [1, 2]
    with pytest.raises(ReplayError, match="has 4 slots"):
        ReplayStore(COLUMNS, capacity=5, folder=tmp_path / "store", fresh=False)
    (tmp_path / "store" / "reward.bin").unlink()
    with pytest.raises(ReplayError, match=r"reward\.bin is missing"):
        ReplayStore(COLUMNS, capacity=4, folder=tmp_path / "store", fresh=False)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_a_sum_tree_finds_what_a_cumulative_sum_finds(size: int) -> None:
    random = np.random.default_rng(size)
    values = random.random(size) * (random.random(size) < 0.7)
    values[size // 2] = 0.5
    tree = SumTree(size)
    tree.set(np.arange(size), random.random(size))
    tree.set(np.arange(size), values)
    assert tree.total == pytest.approx(values.sum())
    sums = random.random(500) * tree.total
    expected = np.searchsorted(np.cumsum(values), sums, side="right")
    assert tree.find(sums).tolist() == expected.tolist()


def test_transitions_are_drawn_in_proportion_and_weights_make_up_for_it() -> None:
    store = ReplayStore(COLUMNS, capacity=4, spare=1)
    priorities = Priorities(store, alpha=0.5)
    for reward in range(6):  # the ring has turned, and the window is 2, 3, 4, 5
        before = store.first
        numbers = put(store, reward)
        priorities.added(numbers, np.arange(before, store.first))
    errors = np.array([99.0, 1.0, 4.0, 9.0, -16.0], np.float32)
    priorities.update(np.array([1, 2, 3, 4, 5]), errors)  # 1 has left the window
    numbers, weight = priorities.draw(np.random.default_rng(0), 10_000, beta=1.0)
    share = np.bincount(numbers, minlength=6) / len(numbers)
    np.testing.assert_allclose(share, [0, 0, 0.1, 0.2, 0.3, 0.4], atol=1e-3)
    np.testing.assert_allclose(weight, 1.0 / (numbers - 1), rtol=1e-5)
    again = Priorities(store, alpha=0.5)  # from the column, as after a restart
    found, _ = again.draw(np.random.default_rng(0), 10_000, beta=1.0)
    assert found.tolist() == numbers.tolist()


def test_a_new_transition_has_the_largest_priority() -> None:
    store = ReplayStore(COLUMNS, capacity=8)
    priorities = Priorities(store, alpha=1.0)
    priorities.added(put(store, 0, 1), np.arange(0))
    priorities.update(np.array([0, 1]), np.array([3.0, 0.5], np.float32))
    priorities.added(put(store, 2), np.arange(0))
    np.testing.assert_allclose(store.arrays["priority"][:3], [3.0, 0.5, 3.0], rtol=1e-5)


def test_priorities_that_are_read_anew_draw_the_same_transitions() -> None:
    """A request that a killed worker had answered has the same answer from the next one."""
    store = ReplayStore(COLUMNS, capacity=20, spare=7)
    first, numbers = Priorities(store, alpha=0.6), np.arange(0)
    for _ in range(4):
        before = store.first
        numbers = store.write({name: store.arrays[name][:8] for name in store.arrays})
        store.count += len(numbers)
        first.added(numbers, np.arange(before, store.first))
        first.update(numbers[::3], np.linspace(0.1, 5.0, 3, dtype=np.float32))
    again = Priorities(store, alpha=0.6)
    again.update(numbers[::3], np.linspace(0.1, 5.0, 3, dtype=np.float32))  # of that request
    expected, found = (one.draw(np.random.default_rng(1), 16, beta=0.5) for one in (first, again))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"capacity": 100}, "batch_size is 256, which is more than the capacity of 100"),
        ({"priority_alpha": 0.0}, "above 0 and at most 1"),
        ({"priority_alpha": 1.5}, "above 0 and at most 1"),
        ({"priority_beta": -0.1}, "between 0 and 1"),
        ({"n_step": 0}, "n_step is 0"),
        ({"storage": "memory", "folder": "somewhere"}, "has no files"),
    ],
)
def test_settings_that_cannot_be_are_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReplayConfig(**wrong)  # type: ignore[arg-type]
