"""Runs on simulators that step many environments in one call."""

from __future__ import annotations

import pytest

from tests.jobs.embodied.kit import Job

VECTOR = ("--env.simulator", "vector")


def test_a_run_trains_on_a_vector_environment_and_counts_only_samples(job: Job) -> None:
    summary = job.succeed(*VECTOR)
    assert summary.iterations == 6
    # Gymnasium's own begins an episode in a step of its own, which is no sample.
    assert 300 < summary.env_steps < 384
    assert summary.evaluation_episodes == 3


def test_a_run_trains_on_envpool(job: Job) -> None:
    pytest.importorskip("envpool")
    summary = job.succeed("--env.simulator", "envpool", "--env.stages", 1)
    assert 300 < summary.env_steps < 384


def test_a_batched_environment_given_as_a_single_one_is_found_by_check(job: Job) -> None:
    entry = "tests.workers.env.test_batched:three"
    ended = job.command("check", job.file, "--env.entry_point", entry, "--env.id", "Three")
    assert ended.code == 2
    assert "env.simulator: Three: SyncVectorEnv steps 3 environments in one call" in ended.err


def test_a_run_trains_on_environments_that_get_ready_one_before_the_other(job: Job) -> None:
    summary = job.succeed(
        "--env.simulator", "pool", "--env.stages", 1, "--training.total_steps", 128
    )
    assert summary.env_steps == 128  # as many of each environment
    assert summary.evaluation_episodes == 3


def test_settings_of_first_ready_batching_that_do_not_go_together_are_found(job: Job) -> None:
    ended = job.command("check", job.file, "--env.ready", "adaptive")
    assert ended.code == 2
    assert "ready is 'adaptive', but the environments of simulator = 'single' are all" in ended.err
    ended = job.command("check", job.file, "--env.simulator", "pool", "--env.ready", "3")
    assert "lie between 1 and the 2 environments of a stage (envs / stages)" in ended.err
