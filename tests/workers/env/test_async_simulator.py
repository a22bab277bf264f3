"""Simulators that give the environments that are ready: EnvPool, and those of one's own."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import Collect
from rlinf_async.workers.env import EnvConfig, EnvFailed, EnvWorker, describe_env
from rlinf_async.workers.env.worker import Environments
from tests.workers.env.test_async_stage import collected, equal
from tests.workers.env.test_batched import vector
from tests.workers.env.toy import ChoosingRollout, Counting

HERE = "tests.workers.env.test_async_simulator"
TICKETS = [Collect(iteration=number, steps=7, min_version=0) for number in range(2)]


class InTurn:
    """Steps environments when they are sent, and gives them in another order, one or two at once.

    It has EnvPool's interface, and begins episodes in the step after their last, or in the same.
    """

    def __init__(self, num_envs: int, seed: int, mode: str = "NEXT_STEP", **kwargs: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode[mode]}
        self._envs = [Counting(**kwargs) for _ in range(num_envs)]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self._ended = [False] * num_envs
        self._random = np.random.default_rng(seed)
        self._ready: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def async_reset(self) -> None:
        for env in range(self.num_envs):
            self._ready.put((env, self._envs[env].reset(seed=0)[0], 0.0, False, False, None, False))

    def send(self, actions: Any, env_id: Any) -> None:
        for place in self._random.permutation(len(env_id)):
            self._ready.put(self._step(int(env_id[place]), actions[place]))

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        got = [self._ready.get()]
        if self._random.random() < 0.5 and not self._ready.empty():
            got.append(self._ready.get())
        env, seen, reward, terminated, truncated, final, success = (
            [one[field] for one in got] for field in range(7)
        )
        info = {"env_id": np.array(env, np.int32), "final_obs": final}
        info["final_info"] = {"is_success": np.array(success)}
        info["is_success"] = np.array(success)
        return np.stack(seen), np.array(reward), np.array(terminated), np.array(truncated), info

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _step(self, env: int, action: Any) -> tuple[Any, ...]:
        if self._ended[env]:
            self._ended[env] = False
            return env, self._envs[env].reset()[0], 0.0, False, False, None, False
        seen, reward, terminated, truncated, info = self._envs[env].step(action)
        final = seen
        if terminated or truncated:
            if self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
                self._ended[env] = True
            else:
                seen = self._envs[env].reset()[0]
        return env, seen, reward, terminated, truncated, final, info["is_success"]


def silent(num_envs: int, seed: int) -> Any:
    """Has no send and recv."""
    return vector(num_envs)


def unseeded(num_envs: int) -> InTurn:
    return InTurn(num_envs, 0)


def by_hand(num_envs: int) -> Any:
    return vector(num_envs, "next_step")


def same_step(num_envs: int) -> Any:
    return vector(num_envs)


@pytest.mark.parametrize("ready", [1, 3, 4, "adaptive"])
@pytest.mark.parametrize(("mode", "wanted"), [("NEXT_STEP", "by_hand"), ("SAME_STEP", "same_step")])
async def test_it_collects_what_a_vector_environment_collects(
    mode: str, wanted: str, ready: Any
) -> None:
    envs: dict[str, Any] = {"id": "Toy", "envs": 4, "stages": 1}
    vectored = EnvConfig(**envs, simulator="vector", entry_point=f"{HERE}:{wanted}")
    expected, report = await collected(EnvWorker, vectored, TICKETS)
    config = EnvConfig(
        **envs, simulator="async", entry_point=f"{HERE}:InTurn", kwargs={"mode": mode}, ready=ready
    )
    got, own = await collected(EnvWorker, config, TICKETS)
    equal(got, expected)
    assert own.env_steps == report.env_steps


async def test_envpool_collects_asynchronously_what_it_collects_in_lock_step() -> None:
    pytest.importorskip("envpool")
    envs: dict[str, Any] = {"id": "CartPole-v1", "envs": 4, "stages": 1, "simulator": "envpool"}
    wanted, _ = await collected(EnvWorker, EnvConfig(**envs), TICKETS, ChoosingRollout)
    for ready in (2, "adaptive"):
        config = EnvConfig(**envs, ready=ready)
        got, _ = await collected(EnvWorker, config, TICKETS, ChoosingRollout)
        equal(got, wanted)


def test_what_the_simulator_raises_names_it_and_its_seed() -> None:
    config = EnvConfig(
        id="Toy",
        envs=2,
        stages=1,
        simulator="async",
        entry_point=f"{HERE}:InTurn",
        kwargs={"shows": float("nan")},
    )
    stage = Environments(config, 0, 0).stage(0)
    with pytest.raises(
        EnvFailed, match=r"Toy\[0\], seed \d+, in recv\(\) at.*, returned an obs.* NaN"
    ):
        stage.reset()
    stage.close()


@pytest.mark.parametrize(
    ("entry", "kwargs", "said"),
    [
        (
            "silent",
            {},
            r"returned a SyncVectorEnv without async_reset\(\), but",
        ),
        ("InTurn", {"mode": "DISABLED"}, "does not begin episodes by itself"),
    ],
)
def test_a_simulator_that_is_none_is_found_before_anything_starts(
    entry: str, kwargs: dict[str, Any], said: str
) -> None:
    config = EnvConfig(entry_point=f"{HERE}:{entry}", simulator="async", kwargs=kwargs)
    with pytest.raises(ConfigError, match=said):
        describe_env(config)


def test_a_simulator_that_gives_those_that_are_ready_is_not_taken_for_one_that_steps_all() -> None:
    config = EnvConfig(
        id="Toy", entry_point=f"{HERE}:unseeded", simulator="vector", envs=2, stages=1
    )
    with pytest.raises(ConfigError, match=r"an? InTurn without reset\(\).*recv\(\) is 'async'"):
        describe_env(config)
