"""Whether policy and environments share a process, where a run has the choice."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import pytest

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.runtime.jobs.embodied import (
    ClusterConfig,
    EmbodiedConfig,
    EmbodiedPPO,
    TrainingConfig,
)
from rlinf_async.runtime.jobs.embodied.choosing import (
    HOP,
    Measured,
    choose,
    chosen,
    compare,
    measure,
)
from rlinf_async.workers.context import Device
from rlinf_async.workers.env import EnvConfig
from tests.jobs.embodied.kit import Job

AUTO = ("--cluster.rollout_workers", "auto")


def rollout_workers(
    step: float,
    forward: float,
    *,
    cores: int,
    stages: int = 2,
    env_workers: int = 1,
    parallel: bool = False,
) -> int:
    env = EnvConfig(id="CartPole-v1", envs=stages, stages=stages, parallel=parallel)
    cluster = ClusterConfig(env_workers=env_workers)
    measured = Measured(step=step, forward=forward)
    return compare(measured, env, cluster, cores).rollout_workers


def test_short_steps_pay_no_hop_however_many_cores_there_are() -> None:
    assert rollout_workers(HOP / 3, HOP / 3, cores=2) == 0
    assert rollout_workers(HOP / 3, HOP / 3, cores=64) == 0


def test_long_steps_overlap_with_a_large_policy_where_there_are_cores_and_stages() -> None:
    assert rollout_workers(0.01, 0.01, cores=4) == 1
    assert rollout_workers(0.01, 0.01, cores=1) == 0
    assert rollout_workers(0.01, 0.01, cores=4, stages=1) == 0
    assert rollout_workers(0.01, 0.01, cores=2, env_workers=2) == 0


def test_one_policy_for_many_env_workers_is_no_gain_where_it_is_what_takes_long() -> None:
    assert rollout_workers(0.001, 0.01, cores=16, env_workers=8) == 0


def config(**cluster: Any) -> EmbodiedConfig:
    env = EnvConfig(id="CartPole-v1", envs=4, stages=2)
    training = TrainingConfig(total_steps=64, steps_per_iteration=16)
    return EmbodiedConfig(env=env, training=training, cluster=ClusterConfig(**cluster))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_config: object) -> Measured:
        raise AssertionError("measured")

    monkeypatch.setattr("rlinf_async.runtime.jobs.embodied.choosing.measure", fail)


@pytest.mark.usefixtures("unmeasured")
def test_what_is_decided_already_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(config(rollout_workers=3)).rollout_workers == 3
    assert capsys.readouterr().out == ""
    assert choose(config(backend="local")).rollout_workers == 0
    gpu = [Device(index=0, kind="cuda", host="a")]
    assert choose(config(), gpu).reason == "the policy has a device of its own"


@pytest.mark.usefixtures("unmeasured")
def test_an_environment_that_cannot_be_measured_is_left_to_its_worker() -> None:
    choice = choose(config(), [])
    assert choice.rollout_workers == 1
    assert "not measured: AssertionError" in choice.reason


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """A step of 5 ms."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def slow() -> Any:
    return Slow(gym.make("CartPole-v1"))


def test_measuring_counts_all_environments_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_async.runtime.jobs.embodied.choosing.ENOUGH", 0.05)
    env = EnvConfig(entry_point="tests.jobs.embodied.test_choosing:slow", envs=4, stages=2)
    policy = PolicyConfig(name="mlp_categorical", observation_size=4, action_size=2)
    full = EmbodiedPPO()._fitted(EmbodiedConfig(env=env, training=config().training))
    assert full.acting_policy.name == policy.name
    found = measure(full)
    assert found.step >= 0.01  # two environments of a stage
    assert found.forward > 0.0


def test_check_and_train_print_what_was_chosen(job: Job) -> None:
    found = job.command("check", job.file, *AUTO)
    assert found.code == 0
    assert "small: rollout_workers = 0 (in one process): everything is in one process" in found.out
    assert "│ rollout" not in found.out
    ended = job.train(*AUTO)
    assert ended.code == 0
    assert "small: rollout_workers = 0" in ended.out
    assert job.summary.iterations == 6
