"""A policy is trained in one environment and judged in another: ``evaluation.env``."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.jobs.embodied.kit import Job

HERE = "tests.jobs.embodied.test_judged_elsewhere"
TRAINED_IN = ("--env.id", "none", "--env.entry_point", f"{HERE}:Pays", "--env.kwargs.each", 1.0)
ALONE = ("--evaluation.env.envs", 1, "--evaluation.env.stages", 1)
JUDGED_IN = ("--evaluation.env.entry_point", f"{HERE}:Pays", "--evaluation.env.kwargs.each", 3.0)


class Pays(gymnasium.Env[Any, Any]):
    """Pays the same in each of five steps; says at the end whether that is at least ``wanted``."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, each: float, wanted: float | None = None) -> None:
        self.each, self.wanted = each, wanted

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        said = {} if self.wanted is None else {"is_success": self.each >= self.wanted}
        return np.zeros(2, np.float32), self.each, self.steps == 5, False, said


@pytest.mark.parametrize(
    "form",
    [
        (),
        ("--cluster.rollout_workers", 0, "--cluster.env_workers", 2),
        ("--env.simulator", "pool"),
        ("--evaluation.env.simulator", "pool"),
        ("--actor.fsdp.policy.name", "gru"),
    ],
    ids=["apart", "together", "from a pool", "in a pool", "with a memory"],
)
def test_the_other_environment_is_judged_and_both_are_said(
    job: Job, form: tuple[object, ...]
) -> None:
    wanted = ("--evaluation.target_return", 15.0, "--training.total_steps", 128)
    summary = job.succeed(*TRAINED_IN, *JUDGED_IN, *wanted, *form)
    assert summary.outcome == "succeeded"
    assert summary.return_ == 15.0
    assert summary.return_in_training == 5.0
    assert summary.evaluation_episodes == 3
    ended = job.command("evaluate", job.out, "--json")
    assert json.loads(ended.out)["return"] == 15.0


def test_success_is_what_the_judging_environment_says(job: Job) -> None:
    short = ("--training.total_steps", 64, "--evaluation.before", "true")
    both = ("--env.kwargs.wanted", 1.0, "--evaluation.env.kwargs.wanted", 4.0)
    summary = job.succeed(*TRAINED_IN, *JUDGED_IN, *short, *both)
    assert summary.success_rate == summary.success_rate_before == 0.0
    assert summary.success_rate_in_training == 1.0
    # Evaluations may differ on a resume; where reality says nothing, nobody has succeeded.
    again = job.succeed(*TRAINED_IN, *JUDGED_IN, "--env.kwargs.wanted", 1.0, *short, "--resume")
    assert again.success_rate is None
    assert again.success_rate_in_training == 1.0
    alone = job.succeed(*TRAINED_IN, "--env.kwargs.wanted", 1.0, *short, "--resume")
    assert alone.success_rate == 1.0
    assert alone.return_in_training is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--evaluation.env.id", "CartPole-v1"), "evaluation.env: CartPole-v1 shows state 'state'"),
        (("--evaluation.env.id", "Pendulum-v1"), "evaluation.env: Pendulum-v1 shows"),
        (("--evaluation.env.id", "CartPol-v1"), "evaluation.env.id: no env is called"),
        ((*JUDGED_IN, "--evaluation.env.action_chunk", 2), "evaluation.env.action_chunk: 2, but"),
        ((*JUDGED_IN, *ALONE, "--evaluation.env.control.hz", 10), "evaluation.env.control: "),
        ((*JUDGED_IN, "--evaluation.env.group_size", 2, "--evaluation.env.stages", 1), "no effect"),
        ((*JUDGED_IN, "--evaluation.env.parallel", "true"), "evaluation.env.parallel: True has no"),
    ],
)
def test_an_environment_that_the_policy_cannot_act_in(
    job: Job, settings: tuple[object, ...], message: str
) -> None:
    ended = job.command("check", job.file, *TRAINED_IN, *settings)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1
