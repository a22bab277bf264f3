"""A deterministic environment, a policy without torch, and the channels between env and rollout."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

import rlinf_async as ra
from rlinf_async.backends.base import PolicyAnswer, PolicyBackend
from rlinf_async.channels import ChannelEmpty
from rlinf_async.messages.embodied import (
    Actions,
    Collect,
    Floats,
    Ints,
    Observations,
    Trajectory,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.host import Pace
from rlinf_async.workers.rollout.policy import RolloutWorker

MAKE = "tests.workers.env.toy:make"


class Counting(gymnasium.Env[Any, Any]):
    """Shows ``[episode, step]``. Odd episodes terminate after 3 steps, even ones are cut after 2.

    An episode that terminates succeeded. The reward is the action times 10, plus the step.
    """

    def __init__(self, fails_at: int | None = None, shows: float = 0.0, pays: float = 0.0) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
        self.fails_at = fails_at
        self.shows, self.pays = shows, pays
        self.seeds: list[int | None] = []
        self.episode = self.at = self.life = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.at = self.episode + 1, 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.life += 1
        if self.life == self.fails_at:
            raise ZeroDivisionError("the toy broke")
        odd = self.episode % 2 == 1
        terminated, truncated = odd and self.at == 3, not odd and self.at == 2
        reward = float(action[0]) * 10 + self.at + self.pays
        return self._shown(), reward, terminated, truncated, {"is_success": terminated}

    def _shown(self) -> Any:
        return np.array([self.episode, self.at], np.float64) + self.shows


class Drawing(gymnasium.Env[Any, Any]):
    """Shows a random number of its own seed; each episode ends by chance."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action not in (5, 6):
            raise ValueError(f"no choice: {action}")
        shown = self.np_random.random(1)
        return shown, float(shown[0]), bool(self.np_random.random() < 0.3), False, {}


class Gated(Counting):
    """Its resets wait until `gate` is opened."""

    gate = threading.Event()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if not self.gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        return super().reset(seed=seed, options=options)


def make_gated() -> Gated:
    """The entry point of `Gated`."""
    return Gated()


def make(**kwargs: Any) -> Counting:
    """The entry point of `Counting`."""
    return Counting(**kwargs)


def make_drawing() -> Drawing:
    """The entry point of `Drawing`."""
    return Drawing()


def counting(envs: int = 2, stages: int = 2, **kwargs: Any) -> EnvConfig:
    """The configuration of `Counting`."""
    return EnvConfig(id="Counting", entry_point=MAKE, envs=envs, stages=stages, kwargs=kwargs)


def drawing(envs: int = 2, stages: int = 2, seed: int = 0) -> EnvConfig:
    """The configuration of `Drawing`."""
    place = "tests.workers.env.toy:make_drawing"
    return EnvConfig(id="Drawing", entry_point=place, envs=envs, stages=stages, seed=seed)


class ToyPolicy:
    """Every output is a formula of the observation and the version."""

    def __init__(self) -> None:
        self.version = -1
        self.forwards: list[int] = []
        """rows of each forward pass"""

    def load(self, update: WeightUpdate) -> None:
        self.version = update.version

    def act(self, observation: Floats) -> PolicyAnswer:
        self.forwards.append(len(observation))
        action = toy_action(observation, self.version)
        return PolicyAnswer(action, action[:, 0] + 7, toy_value(observation, self.version))

    def mode(self, observation: Floats) -> Floats | Ints:
        self.forwards.append(len(observation))
        return -toy_action(observation, self.version)

    def value(self, observation: Floats) -> Floats:
        return toy_value(observation, self.version)


class ToyRollout(RolloutWorker):
    """A rollout worker over `ToyPolicy`."""

    def make_policy(self) -> PolicyBackend:
        return ToyPolicy()


class ChoosingPolicy(ToyPolicy):
    """Discrete: the first choice for small observations, the second for large ones."""

    def act(self, observation: Floats) -> PolicyAnswer:
        zeros = np.zeros(len(observation), np.float32)
        return PolicyAnswer((observation[:, 0] > 0.5).astype(np.int64), zeros, zeros)

    def mode(self, observation: Floats) -> Floats | Ints:
        return self.act(observation).action

    def value(self, observation: Floats) -> Floats:
        return np.zeros(len(observation), np.float32)


class ChoosingRollout(ToyRollout):
    """A rollout worker over `ChoosingPolicy`."""

    def make_policy(self) -> PolicyBackend:
        return ChoosingPolicy()


class ThreadRollout(ToyRollout):
    """Computes in the compute thread only, so that it can be cancelled between any two steps."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self._pace = Pace(self, short=0.0)


def toy_action(observation: Floats, version: int) -> Floats:
    """``[N, 1]``"""
    return (observation[:, :1] + 2 * observation[:, 1:] + version).astype(np.float32)


def toy_value(observation: Floats, version: int) -> Floats:
    """``[N]``"""
    return (100 * observation[:, 0] + observation[:, 1] + 1000 * version).astype(np.float32)


def weights(version: int) -> WeightUpdate:
    """An update without tensors."""
    return WeightUpdate(version, (), 0)


class Channels:
    """All channels of the embodied slice."""

    def __init__(self, cluster: ra.Cluster, ahead: int = 1000) -> None:
        """``ahead``: how many trajectories may lie there before env workers wait."""
        self.tickets = cluster.channel(Collect, name="tickets", max_deliveries=1000)
        self.observations = cluster.channel(Observations, name="observations", max_deliveries=1000)
        self.actions = cluster.channel(Actions, name="actions")
        self.trajectories = cluster.channel(Trajectory, name="trajectories", capacity=ahead)
        self.weights = cluster.latest(WeightUpdate, name="weights")

    async def issue(self, tickets: Iterable[Collect], ranks: int = 1) -> None:
        """Put tickets for every env rank, and then no more."""
        with self.tickets.sender as sender:
            for ticket in tickets:
                for rank in range(ranks):
                    await sender.put(ticket, key=rank)

    def collected(self, actor_rank: int = 0) -> list[Trajectory]:
        """The trajectories that lie there for an actor rank."""
        found: list[Trajectory] = []
        while True:
            try:
                found.append(self.trajectories.receiver.get_nowait(key=actor_rank))
            except (ra.EndOfChannel, ChannelEmpty):
                return found


def by_hand(envs: int, tickets: Iterable[Collect], version: int) -> list[dict[str, Any]]:
    """What one stage collects, by stepping its environments in the plainest way."""
    made = [Counting() for _ in range(envs)]
    shown = [env.reset(seed=0)[0].astype(np.float32) for env in made]
    return [_one_ticket(made, shown, ticket, version) for ticket in tickets]


def _one_ticket(
    made: list[Counting], shown: list[Any], ticket: Collect, version: int
) -> dict[str, Any]:
    rows: dict[str, Any] = {
        name: [[] for _ in range(ticket.steps)]
        for name in ("observation", "action", "reward", "terminated", "truncated", "final_value")
    }
    rows["value"] = []
    returns: list[float] = []
    for step in range(ticket.steps):
        rows["value"].append([float(toy_value(one[None], version)[0]) for one in shown])
        for index, env in enumerate(made):
            action = toy_action(shown[index][None], version)[0]
            after, reward, terminated, truncated, _ = env.step(action)
            cut = truncated and not terminated
            final = float(toy_value(after[None].astype(np.float32), version)[0]) if cut else 0.0
            for name, value in (
                ("observation", shown[index].tolist()),
                ("action", action.tolist()),
                ("reward", reward),
                ("terminated", terminated),
                ("truncated", cut),
                ("final_value", final),
            ):
                rows[name][step].append(value)
            if terminated or truncated:
                returns.append(float(env.at))
                after = env.reset()[0]
            shown[index] = after.astype(np.float32)
    rows["value"].append([float(toy_value(one[None], version)[0]) for one in shown])
    rows["episode_length"] = returns
    return rows
