"""Demonstrations in the replay worker: a share of each batch, whatever is collected or killed."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    write_episode,
    write_info,
)
from rlinf_async.messages.embodied import BatchRequest, ReplayBatch, Trajectory
from rlinf_async.messages.spaces import continuous, flat_spec
from rlinf_async.workers.replay.store import trajectory_of, transitions_of
from rlinf_async.workers.replay.worker import ReplayConfig, ReplayPlan, ReplayWorker

STEPS, SIZE, SHOWN = 6, 16, 0.25
CONFIG = ReplayConfig(capacity=20, batch_size=SIZE, n_step=2, demonstrated_share=SHOWN)


def episode(first: float, *, terminated: bool) -> DemonstratedEpisode:
    """Observations and actions count on from ``first``; rewards are observations."""
    numbers = first + np.arange(STEPS + 1, dtype=np.float32)[:, None]
    outcome = Outcome(numbers[:-1, 0], numbers[-1:], terminated)
    return DemonstratedEpisode(numbers[:-1], numbers[:-1] / 1000.0, outcome)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two episodes, whose observations begin at 100 (it ends) and at 200 (it is cut)."""
    shown = tmp_path / "shown"
    shown.mkdir()
    write_episode(shown, 0, episode(100.0, terminated=True))
    write_episode(shown, 1, episode(200.0, terminated=False))
    info = DemonstrationsInfo(
        env="line", observation=flat_spec(1), action_size=1, episodes=2, transitions=True
    )
    write_info(shown, info)
    return shown


def worker(
    folder: pathlib.Path | None,
    store: pathlib.Path,
    *,
    ranks: int = 1,
    resume: str = "",
    start: str = "first",
    intervened: bool = False,
    acts: bool = True,
    **settings: object,
) -> ReplayWorker:
    shown = "" if folder is None else str(folder)
    config = msgspec.structs.replace(CONFIG, demonstrations=shown, **settings)
    plan = ReplayPlan(
        observation=flat_spec(1),
        action=continuous(1),
        gamma=0.5,
        seed=3,
        iterations=10,
        iteration_steps=STEPS,
        ranks=ranks,
        spare=40,
        folder=str(store),
        start=start,
        resume=resume,
        intervened=intervened,
        acts=acts,
    )
    made = ReplayWorker(config, plan)
    made._open()
    return made


def collected(iteration: int) -> Trajectory:
    """Own experience: observations below 100."""
    whole = trajectory_of(episode(10.0 * iteration, terminated=False))
    return msgspec.structs.replace(whole, iteration=iteration, version=np.full(STEPS, iteration))


def drawn(one: ReplayWorker, iteration: int, count: int = 5) -> list[list[ReplayBatch]]:
    return [one._draw(BatchRequest(iteration=iteration, number=number)) for number in range(count)]


def learnt(one: ReplayWorker, iterations: range) -> list[list[ReplayBatch]]:
    """All batches of these iterations."""
    batches = []
    for iteration in iterations:
        one._store_all(iteration, [collected(iteration)])
        batches += drawn(one, iteration)
    return batches


def same(some: list[list[ReplayBatch]], others: list[list[ReplayBatch]]) -> None:
    for [one], [other] in zip(some, others, strict=True):
        for name, value in msgspec.structs.asdict(one).items():
            np.testing.assert_array_equal(value, getattr(other, name), name)


@pytest.mark.parametrize("terminated", [True, False])
def test_an_episode_becomes_the_transitions_that_collecting_it_would_give(terminated: bool) -> None:
    made = transitions_of(trajectory_of(episode(1.0, terminated=terminated)), n_step=2, gamma=0.5)
    assert made.observation[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert made.reward.tolist() == [2.0, 3.5, 5.0, 6.5, 8.0, 6.0]  # r + r' / 2
    assert made.next_observation[:, 0].tolist() == [3, 4, 5, 6, 7, 7]
    ends = [0.0, 0.0] if terminated else [0.25, 0.5]
    assert made.discount.tolist() == [0.25, 0.25, 0.25, 0.25, *ends]
    assert (made.version == -1).all()
    with pytest.raises(ValueError, match="has no rewards"):
        trajectory_of(DemonstratedEpisode(made.observation, made.action))


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_every_batch_has_its_share_and_own_experience_never_overwrites_any(
    folder: pathlib.Path, tmp_path: pathlib.Path, storage: str, sampling: str
) -> None:
    settings: dict[str, Any] = {"storage": storage, "sampling": sampling}
    one = worker(folder, tmp_path / "store", **settings)
    own = worker(None, tmp_path / "own", batch_size=12, demonstrated_share=0.5, **settings)
    seen = set()
    for [batch], [alone] in zip(learnt(one, range(9)), learnt(own, range(9)), strict=True):
        shown = batch.demonstrated
        assert shown is not None
        assert shown.tolist() == [False, False, False, True] * 4
        assert ((batch.observation[:, 0] >= 100.0) == shown).all()
        np.testing.assert_array_equal(batch.index[shown], -1)
        np.testing.assert_array_equal(batch.weight[shown], 1.0)
        # What is own is what would be drawn of own experience alone.
        for name in ("index", "weight", "observation", "reward", "discount", "version"):
            np.testing.assert_array_equal(getattr(batch, name)[~shown], getattr(alone, name))
        seen |= set(batch.observation[shown, 0].tolist())
        one._draw(BatchRequest(iteration=9, number=0, index=batch.index, priority=batch.weight))
        own._draw(BatchRequest(iteration=9, number=0, index=alone.index, priority=alone.weight))
    assert seen == {*range(100, 106), *range(200, 206)}
    assert len(one._store) == 20  # the ring went round twice


@pytest.mark.parametrize("acts", [True, False], ids=["acts", "says"])
def test_what_a_person_does_or_says_is_drawn_as_a_demonstration(
    folder: pathlib.Path, tmp_path: pathlib.Path, acts: bool
) -> None:
    one = worker(folder, tmp_path / "store", intervened=True, acts=acts)
    given = collected(0)
    given.intervened = np.arange(STEPS)[:, None] % 2 == 1
    if not acts:
        given.label = np.full_like(given.action, 7.0)
    one._store_all(0, [given])
    for [batch] in drawn(one, 0, 20):
        shown = batch.demonstrated
        assert shown is not None
        assert shown.sum() == SIZE * SHOWN
        theirs = shown & (batch.observation[:, 0] < 100.0)
        assert set(batch.observation[theirs, 0].tolist()) <= {1.0, 3.0, 5.0}
        assert acts or (batch.action[theirs] == 7.0).all()
        np.testing.assert_array_equal(batch.weight, np.where(theirs & (not acts), 0.0, 1.0))
        assert not (batch.action[~shown] == 7.0).any()
    assert one._state.intervened == 3
    again = worker(folder, tmp_path / "store", intervened=True, acts=acts)
    same(drawn(one, 0), drawn(again, 0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_batch_of_one(
    folder: pathlib.Path, tmp_path: pathlib.Path, ranks: int
) -> None:
    alone = learnt(worker(folder, tmp_path / "one"), range(2))
    together = learnt(worker(folder, tmp_path / "many", ranks=ranks), range(2))
    for [whole], shares in zip(alone, together, strict=True):
        assert len(shares) == ranks
        for name in ("observation", "action", "reward", "discount", "weight", "demonstrated"):
            parts = [getattr(one, name) for one in shares]
            np.testing.assert_array_equal(np.concatenate(parts), getattr(whole, name))
        for share in shares:
            assert share.demonstrated is not None
            assert share.demonstrated.sum() == SIZE * SHOWN / ranks


def test_a_killed_worker_draws_what_it_would_have_drawn(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """It left its files in the midst of iteration 3, and the run is then resumed from the
    checkpoint after iteration 1."""
    whole = worker(folder, tmp_path / "whole")
    expected = learnt(whole, range(8))
    one = worker(folder, tmp_path / "killed")
    learnt(one, range(2))
    one._save(tmp_path / "checkpoint")
    learnt(one, range(2, 4))
    (tmp_path / "killed/demonstrations/reward.bin").write_bytes(b"half written")
    again = worker(folder, tmp_path / "killed")
    same(drawn(again, 3), expected[15:20])
    same(learnt(again, range(4, 6)), expected[20:30])
    resumed = worker(
        folder, tmp_path / "killed", start="second", resume=str(tmp_path / "checkpoint")
    )
    same(learnt(resumed, range(2, 8)), expected[10:])
