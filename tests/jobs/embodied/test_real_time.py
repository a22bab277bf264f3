"""Runs in real time: each step of a robot counts once, and misses stand in the metrics."""

from __future__ import annotations

import pytest

from tests.jobs.embodied.kit import Job

LIMIT = 12
LINE = (
    *("--env.id", "", "--env.entry_point", "tests.workers.env.test_real_time:Line"),
    *("--env.kwargs.limit", LIMIT, "--env.control.hz", 500, "--actor.normalize_reward", "false"),
)
ALONE = ("--env.envs", 1, "--env.stages", 1)
STEPS = ("--training.total_steps", 96, "--training.steps_per_iteration", 48)


@pytest.mark.parametrize(
    "form",
    [
        (*ALONE, "--env.action_chunk", 4, "--actor.ppo.minibatch_size", 8),
        (
            *ALONE,
            "--env.action_chunk",
            4,
            "--env.control.every",
            4,
            "--actor.ppo.minibatch_size",
            8,
        ),
        ALONE,
        ("--env.envs", 2, "--env.stages", 2, "--env.parallel", "true", "--env.action_chunk", 2),
        ("--env.envs", 2, "--env.stages", 1, "--env.simulator", "pool", "--env.action_chunk", 2),
    ],
    ids=["chunks", "whole chunks", "single actions", "parallel", "pool"],
)
def test_an_episode_has_each_step_of_the_robot_once(job: Job, form: tuple[object, ...]) -> None:
    ended = job.train(*LINE, *STEPS, *form)
    assert ended.code == 0, ended.err
    envs = int(form[1])  # type: ignore[call-overload]
    rows = job.iterations
    assert job.summary.env_steps == 48 * envs * len(rows)
    for row in rows:
        # It pays 1 for a step: what a late answer adds or an episode's end takes is counted, too.
        assert float(row["return"]) == LIMIT
        taken = float(row["control_steps"]) - float(row["control_skipped"])
        assert taken > 0
        assert float(row["control_answer_ms"]) > 0.0
        parts = [float(row[f"control_{one}"]) for one in ("starved", "late", "skipped")]
        assert float(row["control_missed"]) == sum(parts)
    assert job.summary.return_ == LIMIT
    assert str(job.summary.extra["evaluation_missed_deadlines"]).endswith(" steps")


def test_commands_that_the_policy_did_not_say_are_told_once(job: Job) -> None:
    narrow = ("--env.control.safety.max_step", "[0.001]", "--env.control.safety.rest", "[0.0]")
    never = ("--training.stop_at.metric", "control_missed", "--training.stop_at.least", 1e9)
    ended = job.train(*LINE, *STEPS, *ALONE, *narrow, *never)
    assert ended.code == 0, ended.err
    assert sum(float(row["control_clipped"]) for row in job.iterations) > 0
    assert ended.err.count("the robot did not do what the policy said") == 1


def test_an_emergency_stop_ends_the_run_with_its_reason(job: Job) -> None:
    ended = job.train(*LINE, *STEPS, *ALONE, "--env.kwargs.stops_at", 5, "--env.probe", "false")
    assert ended.code == 1
    assert "EmergencyStop: the robot was stopped: the red button" in ended.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--env.step_seconds", 0.002), "env.step_seconds: 0.002, but in real time the 1 steps"),
        (("--env.control.every", 2), "env.control.every: 2 steps between two questions do not"),
        (("--env.control.safety.low", "[0, 1, 2]"), "env.control.safety.low: 3 numbers, but an ac"),
        (
            ("--env.control.hz", 0, "--env.control.on_late", "stop"),
            "env.control.on_late: is set, b",
        ),
        (("--env.envs", 2), "env.control.hz: 500, but with simulator = 'single' and envs = 2 in"),
        (
            ("--env.action_chunk", 4, "--actor.ppo.log_prob_level", "action"),
            "actor.ppo.log_prob_level: 'action', but in real time",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    job: Job, settings: tuple[object, ...], said: str
) -> None:
    ended = job.command("check", job.file, *LINE, *STEPS, *ALONE, *settings)
    assert ended.code == 2
    assert said in ended.err
