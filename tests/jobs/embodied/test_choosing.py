"""Whether policy and environments share a process, where a run has the choice."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import msgspec
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.messages.spaces import flat_spec
from rlinf_async.runtime.jobs.embodied import (
    EmbodiedClusterConfig,
    EmbodiedConfig,
    EmbodiedTrainingConfig,
)
from rlinf_async.runtime.jobs.embodied.choosing import (
    HOP,
    Measured,
    chosen,
    compare,
    decided,
    foreseen,
    seconds_to_measure,
)
from rlinf_async.runtime.jobs.embodied.settings import tried
from rlinf_async.workers.base import Device
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env.trial import try_env
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
    cluster = EmbodiedClusterConfig(env_workers=env_workers)
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
    training = EmbodiedTrainingConfig(total_steps=64, steps_per_iteration=16)
    return EmbodiedConfig(env=env, training=training, cluster=EmbodiedClusterConfig(**cluster))


def test_what_is_decided_already_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(config(rollout_workers=3), None).rollout_workers == 3
    assert capsys.readouterr().out == ""
    assert chosen(config(backend="local"), None).rollout_workers == 0
    gpu = [Device(index=0, kind="cuda", host="a")]
    found = decided(config(), gpu)
    assert found is not None
    assert found.reason == "the policy has a device of its own"
    assert seconds_to_measure(config(rollout_workers=1)) == 0.0
    assert seconds_to_measure(config(backend="local")) == 0.0


def test_an_environment_that_cannot_be_measured_is_left_to_its_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen(config(), None, []).rollout_workers == 1
    assert "not measured: the environment raised" in capsys.readouterr().out


def test_check_says_what_it_can_say_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreseen(config(backend="local")).rollout_workers == 0
    capsys.readouterr()
    assert foreseen(config(), []).rollout_workers == "auto"
    assert "rollout_workers = 0 or 1, as measured when the run" in capsys.readouterr().out


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """A step of 5 ms."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def slow() -> Any:
    return Slow(gym.make("CartPole-v1"))


def test_measuring_counts_all_environments_of_a_stage() -> None:
    env = EnvConfig(entry_point="tests.jobs.embodied.test_choosing:slow", envs=4, stages=2)
    found = try_env(env, 0.05)
    assert found is not None
    assert found.seconds >= 0.01  # two environments of a stage
    assert found.rows(flat_spec(4)).shape == (2, 4)


def with_two_threads() -> Any:
    if os.environ.get("OMP_NUM_THREADS") != "2":
        raise RuntimeError("another number of threads than its worker's")
    return gym.make("CartPole-v1")


def test_what_is_measured_has_the_environment_variables_of_env_workers() -> None:
    env = EnvConfig(entry_point="tests.jobs.embodied.test_choosing:with_two_threads")
    fitting = msgspec.structs.replace(config(backend="process", threads=2), env=env)
    assert tried(fitting, 0.05) is not None
    other = msgspec.structs.replace(fitting, cluster=EmbodiedClusterConfig(backend="process"))
    with pytest.raises(ConfigError, match="another number of threads"):
        tried(other, 0.05)


def carts(num_envs: int, mode: str) -> Any:
    makers = [lambda: gym.make("CartPole-v1")] * num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode[mode])


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_simulators_are_measured_however_their_episodes_begin(mode: str) -> None:
    entry = "tests.jobs.embodied.test_choosing:carts"
    env = EnvConfig(entry_point=entry, kwargs={"mode": mode}, simulator="vector", envs=4, stages=2)
    assert try_env(env, 0.05) is not None


def test_check_and_train_print_what_was_chosen(job: Job) -> None:
    found = job.command("check", job.file, *AUTO)
    assert found.code == 0
    assert "small: rollout_workers = 0 (in one process): everything is in one process" in found.out
    assert "│ rollout" not in found.out
    ended = job.train(*AUTO)
    assert ended.code == 0
    assert "small: rollout_workers = 0" in ended.out
    assert job.summary.iterations == 6
