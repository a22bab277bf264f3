"""Goals in hindsight: what is drawn equals a plain script, whatever is killed between."""

from __future__ import annotations

import pathlib
from typing import Any, ClassVar

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import BatchRequest, Collect, ReplayBatch, Trajectory
from rlinf_async.messages.spaces import continuous, flat_spec
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.goals import GoalRewards, Goals, describe_goals
from rlinf_async.workers.replay.columns import ReplayError
from rlinf_async.workers.replay.store import transitions_of
from rlinf_async.workers.replay.worker import ReplayConfig, ReplayPlan, ReplayWorker, spread

STEPS, GAMMA = 5, 0.5


class Road(gymnasium.Env[Any, Any]):
    """Moves a place on a road by an action, and pays 0 where the goal is at most 1 away, else -1.

    Args:
        ends: whether an episode terminates there; it is cut after 7 steps.
        crashes: beyond this place it terminates, whatever the goal.
        extra: paid besides, of which ``compute_reward`` says nothing.
    """

    def __init__(self, ends: bool = False, crashes: float = 1e9, extra: float = 0.0) -> None:
        self.ends, self.crashes, self.extra = ends, crashes, extra
        goal = spaces.Box(-99.0, 99.0, (1,), np.float64)
        self.observation_space = spaces.Dict(
            observation=spaces.Box(-99.0, 99.0, (2,)), achieved_goal=goal, desired_goal=goal
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.length = float(self.np_random.integers(-9, 9)), 0
        self.goal = self.at + float(self.np_random.integers(-5, 5))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += float(action[0])
        self.length += 1
        seen = self._shown()
        both = seen["achieved_goal"], seen["desired_goal"]
        reward = self.compute_reward(*both, {}) + self.extra
        ended = self.compute_terminated(*both, {}) or self.at > self.crashes
        return seen, reward, ended, self.length == 7, {}

    def _shown(self) -> Any:
        return {
            "observation": np.array([self.at, self.length], np.float32),
            "achieved_goal": np.array([self.at]),
            "desired_goal": np.array([self.goal]),
        }

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> float:
        return -float(abs((achieved - desired).item()) > 1.0)

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> bool:
        return self.ends and bool(abs((achieved - desired).item()) <= 1.0)


class Broad(Road):
    """The same, whose functions take many steps at once, too."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(np.abs(achieved - desired)[..., 0] > 1.0).astype(np.float32)

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> Any:
        return self.ends & (np.abs(achieved - desired)[..., 0] <= 1.0)


class Noted(Broad):
    """The same, which notes how many steps it was asked about at once."""

    asked: ClassVar[list[int]] = []

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        self.asked.append(np.ndim(achieved) and len(np.reshape(achieved, (-1, 1))))
        return super().compute_reward(achieved, desired, info)


def env_config(kind: str = "Road", **kwargs: object) -> EnvConfig:
    return EnvConfig(entry_point=f"{__name__}:{kind}", kwargs=kwargs, envs=2, stages=1)


def collect(
    config: EnvConfig, iterations: int, rank: int = 0, incarnation: int = 0, steps: int = STEPS
) -> list[Any]:
    """Trajectories of a worker's environments, which go on from one to the next."""
    from rlinf_async.messages.embodied import Actions
    from rlinf_async.workers.env.record import Record
    from rlinf_async.workers.env.worker import Environments

    stage = Environments(config, rank, incarnation).stage(0)
    random, made = np.random.default_rng((rank, incarnation)), []
    for iteration in range(iterations):
        ticket = Collect(iteration=iteration, steps=steps, min_version=0, transitions=True)
        stage.needs_reset and stage.reset()  # type: ignore[func-returns-value]
        record = Record(ticket, rank, 0, stage.observation, incarnation)
        while not record.full:
            zeros = np.zeros(config.envs, np.float32)
            answer = Actions(
                incarnation=0,
                sequence=0,
                action=random.uniform(-1, 1, (config.envs, 1)).astype(np.float32),
                log_prob=zeros,
                value=zeros,
                final_value=None,
                version=iteration,
            )
            record.acted(stage.observation, answer)
            record.stepped(stage.step(answer.action))
            stage.needs_reset and stage.reset()  # type: ignore[func-returns-value]
        made.append(record.finish_transitions(stage.observation))
    return made


def worker(env: EnvConfig, store: pathlib.Path, start: str = "first", **given: Any) -> ReplayWorker:
    resume, ranks = given.pop("resume", ""), given.pop("ranks", 1)
    settings: dict[str, Any] = {"capacity": 1000, "batch_size": 32, "hindsight": "future", **given}
    plan = ReplayPlan(
        observation=flat_spec(4),
        action=continuous(1),
        gamma=GAMMA,
        seed=3,
        iterations=10,
        iteration_steps=4 * STEPS,
        spare=200,
        folder=str(store),
        start=start,
        resume=resume,
        ranks=ranks,
        goals=describe_goals(env),
        env=env,
    )
    made = ReplayWorker(ReplayConfig(**settings), plan)
    made._open()
    return made


def draw(one: ReplayWorker, iteration: int, count: int = 4) -> list[ReplayBatch]:
    requests = (BatchRequest(iteration=iteration, number=number) for number in range(count))
    return [one._draw(request)[0] for request in requests]


def same(some: list[ReplayBatch], others: list[ReplayBatch]) -> None:
    for one, other in zip(some, others, strict=True):
        for name, value in msgspec.structs.asdict(one).items():
            np.testing.assert_array_equal(value, getattr(other, name), name)


# ---- the plain script


Step = dict[str, Any]


def episodes_in(parts: list[list[Trajectory]]) -> list[list[Step]]:
    """Episodes of environments, whose trajectories follow each other in each of ``parts``."""
    found: list[list[Step]] = []
    for part in parts:
        for env in range(2):
            episode: list[Step] = []
            for one in part:
                made = transitions_of(one, n_step=1, gamma=GAMMA)  # rows are steps, then envs
                for step in range(STEPS):
                    row = 2 * step + env
                    episode.append({name: value[row] for name, value in made._asdict().items()})
                    if one.terminated[step, env] or one.truncated[step, env]:
                        found.append(episode)
                        episode = []
            found.append(episode)
    return [one for one in found if one]


def expected(env: Road, episode: list[Step], at: int, goal: Any, n_step: int) -> Step:
    """A transition with another goal: its rewards are those of the environment, step by step."""
    reward, discount, last = 0.0, 1.0, at
    for last in range(at, min(at + n_step, len(episode))):
        step = episode[last]
        achieved, desired = step["next_observation"][:1], step["next_observation"][1:2]
        reward += discount * env.compute_reward(achieved, goal, {})
        goals_end = step["discount"] == 0.0 and env.compute_terminated(achieved, desired, {})
        crashed = step["discount"] == 0.0 and not goals_end
        discount *= GAMMA
        if crashed or env.compute_terminated(achieved, goal, {}):
            discount = 0.0
            break
    seen, following = episode[at]["observation"].copy(), episode[last]["next_observation"].copy()
    seen[1:2] = following[1:2] = goal
    action = episode[at]["action"]
    return {
        "observation": seen,
        "next_observation": following,
        "reward": reward,
        "discount": discount,
        "action": action,
    }


def check_batches(
    env: Road, batches: list[ReplayBatch], parts: list[list[Trajectory]], strategy: str, n: int = 1
) -> set[tuple[int, int]]:
    """Every row is a step with its own goal, or one that its episode reached; return how many steps
    after each step its goal was reached, and how many the episode had after it."""
    episodes = episodes_in(parts)
    steps = {
        (*step["observation"], *step["action"]): (episode, at)
        for episode in episodes
        for at, step in enumerate(episode)
    }
    places = {key[2:]: found for key, found in steps.items()}
    assert len(places) == sum(len(episode) for episode in episodes)
    seen = set()
    for batch in batches:
        given = np.zeros(len(batch.reward), np.bool_)
        for row in range(len(given)):
            found = {name: getattr(batch, name)[row] for name in ("observation", "action")}
            episode, at = places[(*found["observation"][2:], *found["action"])]
            goal = found["observation"][1:2]
            own = goal == episode[at]["observation"][1:2]
            reached = [one["next_observation"][:1] for one in episode]
            later = [q for q in range(at, len(episode)) if reached[q] == goal]
            if strategy == "final":
                later = [q for q in later if q == len(episode) - 1]
            given[row] = not own
            assert own or later
            seen |= {(q - at, len(episode) - 1 - at) for q in later} if not own else set()
            wanted = expected(env, episode, at, goal, n) if not own else None
            for name, value in (wanted or {}).items():
                np.testing.assert_allclose(getattr(batch, name)[row], value, atol=1e-6)
        assert given.tolist() == spread(round(0.8 * 32), 32).tolist()
    return seen


ENDS, CRASHES = {"ends": True}, {"ends": True, "crashes": 8.0}


@pytest.mark.parametrize(
    ("kind", "strategy", "n_step", "kwargs"),
    [
        ("Road", "future", 1, {}),
        ("Broad", "future", 1, {}),
        ("Road", "final", 1, ENDS),
        ("Broad", "final", 3, {}),
        ("Road", "future", 3, CRASHES),
        ("Broad", "future", 3, CRASHES),
        ("Broad", "future", 2, ENDS),
    ],
)
def test_a_batch_is_that_of_a_plain_script(
    tmp_path: pathlib.Path, kind: str, strategy: str, n_step: int, kwargs: dict[str, Any]
) -> None:
    env = env_config(kind, **kwargs)
    one = worker(env, tmp_path, hindsight=strategy, n_step=n_step)
    seen = set[tuple[int, int]]()
    parts = [collect(env, 5, rank) for rank in range(2)]
    for iteration, ordered in enumerate(zip(*parts, strict=True)):
        one._store_all(iteration, ordered)
        so_far = [part[: iteration + 1] for part in parts]
        seen |= check_batches(Road(**kwargs), draw(one, iteration), so_far, strategy, n_step)
    assert len(one._store) == 5 * 2 * 2 * STEPS
    if strategy == "future" and not kwargs:
        assert {left for _, left in seen} == {*range(7)}
        assert {at for at, left in seen if left == 6} == {*range(7)}


def test_steps_as_many_as_a_goal_has_numbers_are_asked_one_by_one_and_only_they() -> None:
    """One step is as many as this goal has numbers: what a result ``[1]`` is of, nobody knows."""
    env = env_config("Noted")
    rewards, places = GoalRewards(env, describe_goals(env)), np.arange(4.0, dtype=np.float32)
    Noted.asked.clear()
    for count in (4, 1, 4):
        paid = rewards.rewards(places[:count, None], np.zeros((count, 1), np.float32))
        assert paid.tolist() == [0.0, 0.0, -1.0, -1.0][:count]
    assert Noted.asked == [4, 1, 4]


def test_a_killed_worker_and_a_resumed_run_draw_what_they_would_have_drawn(
    tmp_path: pathlib.Path,
) -> None:
    """It left its files in the midst of iteration 3, and the run is then resumed from the
    checkpoint after iteration 1: other episodes begin there."""
    env = env_config("Broad", ends=True)
    given: dict[str, Any] = {"capacity": 60, "n_step": 2}
    parts = [collect(env, 8, rank) for rank in range(2)]
    ordered = [*zip(*parts, strict=True)]
    whole = worker(env, tmp_path / "whole", **given)
    expected_batches = []
    for iteration in range(8):
        whole._store_all(iteration, ordered[iteration])
        expected_batches += draw(whole, iteration)
    one = worker(env, tmp_path / "killed", **given)
    for iteration in range(2):
        one._store_all(iteration, ordered[iteration])
    one._save(tmp_path / "checkpoint")
    one._store_all(2, ordered[2])
    with pytest.raises(ZeroDivisionError):
        one._store_all(3, (ordered[3][0], _Dies(ordered[3][1])))  # type: ignore[arg-type]
    for iteration in range(3, 6):
        one = worker(env, tmp_path / "killed", **given)
        one._store_all(iteration, ordered[iteration])
        same(draw(one, iteration), expected_batches[4 * iteration :][:4])
    again = {"resume": str(tmp_path / "checkpoint"), **given}
    one = worker(env, tmp_path / "killed", "second", **again)
    same(draw(one, 1), expected_batches[4:8])
    new = [collect(env, 1, rank, incarnation=7)[0] for rank in range(2)]
    one._store_all(2, new)
    assert one._store.count == 60
    old = [part[:2] for part in parts]
    check_batches(Road(ends=True), draw(one, 2), [*old, *[[part] for part in new]], "future", 2)


class _Dies:
    """A trajectory, on whose reading the worker dies."""

    def __init__(self, one: Trajectory) -> None:
        self.terminated = one.terminated

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def test_another_life_of_an_environment_begins_other_episodes(tmp_path: pathlib.Path) -> None:
    env = env_config()
    one = worker(env, tmp_path)
    lives = [collect(env, 2, incarnation=life) for life in range(2)]
    for iteration, trajectory in enumerate([*lives[0], *lives[1]]):
        one._store_all(iteration, [trajectory])
    check_batches(Road(), draw(one, 3), lives, "future")
    # One of the same life that does not go on where the last one ended: a ticket was given up.
    one._store_all(4, [lives[0][0]])
    assert len({*one._store.arrays["episode"][:50].tolist()}) == len(
        episodes_in([*lives, [lives[0][0]]])
    )


def test_episodes_that_leave_the_store_are_forgotten(tmp_path: pathlib.Path) -> None:
    env = env_config()
    one = worker(env, tmp_path, capacity=33)
    trajectories = collect(env, 12)
    for iteration, trajectory in enumerate(trajectories):
        one._store_all(iteration, [trajectory])
        check_batches(Road(), draw(one, iteration, 2), [trajectories[: iteration + 1]], "future")
    assert one._hindsight is not None
    assert len(one._hindsight._episodes) <= 8


def test_rewards_that_are_not_computed_are_named(tmp_path: pathlib.Path) -> None:
    env = env_config(extra=0.5)
    one = worker(env, tmp_path)
    with pytest.raises(ReplayError, match="compute_reward says 0, and other rewards than that"):
        one._store_all(0, collect(env, 1))


def test_rewards_that_are_not_computed_are_found_in_short_trajectories_too(
    tmp_path: pathlib.Path,
) -> None:
    env = msgspec.structs.replace(env_config(extra=0.5), envs=1, stages=1)
    one = worker(env, tmp_path)
    first, second = collect(env, 2, steps=1)
    one._store_all(0, [first])  # one may differ
    with pytest.raises(ReplayError, match="other rewards than that in 2 of 2 steps"):
        one._store_all(1, [second])


def test_ranks_share_the_batch_of_one(tmp_path: pathlib.Path) -> None:
    whole, halves = (
        worker(env_config(), tmp_path / "1"),
        worker(env_config(), tmp_path / "2", ranks=2),
    )
    for one in (whole, halves):
        one._store_all(0, collect(env_config(), 1))
    [expected_batch], shares = draw(whole, 0, 1), halves._draw(BatchRequest(iteration=0, number=0))
    for name in ("observation", "reward", "discount"):
        parts = np.concatenate([getattr(share, name) for share in shares])
        np.testing.assert_array_equal(parts, getattr(expected_batch, name))


def test_environments_without_goals_are_named() -> None:
    assert describe_goals(env_config()) == Goals(0, 1, (1,), "float64")
    with pytest.raises(ConfigError, match="shows no Dict with 'achieved_goal'"):
        describe_goals(EnvConfig(id="Pendulum-v1"))
    with pytest.raises(ConfigError, match="has no compute_reward"):
        describe_goals(EnvConfig(entry_point=f"{__name__}:mute"))


def mute() -> gymnasium.Env[Any, Any]:
    """A goal environment that does not say what goals pay."""

    class Mute(gymnasium.Env[Any, Any]):
        observation_space, action_space = Road().observation_space, Road().action_space

    return Mute()
