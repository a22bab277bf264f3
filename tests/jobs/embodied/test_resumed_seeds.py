"""A resumed run meets new episodes and draws new noise; a fresh one draws what it always did."""

from __future__ import annotations

import pytest

from rlinf_async.runtime.jobs.embodied.settings import (
    EmbodiedConfig,
    EmbodiedTrainingConfig,
    reseeded,
)
from rlinf_async.workers.env import EnvConfig
from tests.jobs.embodied.kit import Job, Trained, record_training

CONFIG = EmbodiedConfig(
    seed=3,
    env=EnvConfig(id="CartPole-v1", seed=3),
    training=EmbodiedTrainingConfig(total_steps=1, steps_per_iteration=1),
)


def test_a_fresh_run_keeps_its_seeds() -> None:
    assert reseeded(CONFIG, 0) == CONFIG


def test_every_start_has_seeds_of_its_own_and_the_same_evaluation() -> None:
    starts = [reseeded(CONFIG, version) for version in range(50)]
    assert len({one.env.seed for one in starts}) == 50
    assert len({one.rollout.seed for one in starts}) == 50
    assert {one.evaluation for one in starts} == {CONFIG.evaluation}
    assert {(one.seed, one.actor.seed) for one in starts} == {(CONFIG.seed, CONFIG.actor.seed)}


def first_observations(trained: list[Trained]) -> list[list[float]]:
    """Where the environments began, at the first iteration that was trained."""
    return [row.tolist() for one in trained[0].batch for row in one.observation[0]]


def test_a_resumed_run_does_not_meet_the_first_episodes_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    job.succeed("--training.total_steps", 128)
    fresh = first_observations(trained)
    trained.clear()
    job.succeed("--training.total_steps", 256, "--resume")
    assert trained[0].version == 2
    resumed = first_observations(trained)
    assert all(row not in fresh for row in resumed)
