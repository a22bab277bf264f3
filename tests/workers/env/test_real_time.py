"""An environment in real time: what a worker sees of it. Nothing here waits for a time to pass: the
clock can be put forward."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.realtime import ControlConfig, SafetyConfig
from rlinf_async.workers.env import EnvConfig, EnvFailed, make_env
from rlinf_async.workers.env.real_time import RealTimeEnv
from rlinf_async.workers.env.stage import ACTION_REWARDS, CONTROL, Slot

FAST = ControlConfig(hz=1000.0)
MAKE = "tests.workers.env.test_real_time:Line"


class Line(gymnasium.Env[Any, Any]):
    """Shows how many steps it has taken, and pays 1 for each; ends after ``limit``."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 Gymnasium's name

    def __init__(self, limit: int = 100, stops_at: int = 0, breaks_at: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = gymnasium.spaces.Box(-1e6, 1e6, (2,))
        self.render_mode = "rgb_array"
        self._limit, self._stops_at, self._breaks_at = limit, stops_at, breaks_at
        self.commands: list[float] = []
        self.threads: set[int] = {threading.get_ident()}
        self.closed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.commands = []
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.commands.append(float(action[0]))
        taken = len(self.commands)
        if taken == self._breaks_at:
            raise ZeroDivisionError("the robot broke")
        info = {"emergency_stop": taken == self._stops_at, "reason": "the red button"}
        over = taken == self._limit
        return np.full(1, taken, np.float32), 1.0, over, False, {**info, "is_success": True}

    def render(self) -> Any:
        self.threads.add(threading.get_ident())
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Skipping:
    """A monotonic clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@contextmanager
def playing(
    control: ControlConfig = FAST,
    size: int = 4,
    clock: Callable[[], float] = time.monotonic,
    **kwargs: Any,
) -> Iterator[tuple[RealTimeEnv, Line]]:
    env = RealTimeEnv(partial(Line, **kwargs), control, size, clock)
    line = env.unwrapped
    assert isinstance(line, Line)
    try:
        yield env, line
    finally:
        env.close()


def chunk(number: int, size: int = 4) -> Any:
    """Actions that say of which answer they are, and their place in it."""
    return np.stack([np.full(2, 100.0 * number + place, np.float32) for place in range(size)])


def test_each_step_of_the_robot_is_in_the_reward_of_one_step_and_has_one_command() -> None:
    with playing(limit=60) as (env, line):
        env.reset(seed=0)
        rewards, numbers, steps, over = list[float](), 0, 0, False
        info: dict[str, Any] = {}
        while not over:
            observation, reward, over, cut, info = env.step(chunk(numbers))
            numbers += 1
            rewards.append(reward)
            steps += info[CONTROL].steps - info[CONTROL].skipped
            assert sum(rewards) == steps == observation[0]
            assert not cut
            assert sum(info[ACTION_REWARDS]) == reward
            assert len(info[ACTION_REWARDS]) <= 2
        assert sum(rewards) == 60
        assert info["is_success"]
        # Commands are of ever newer answers, or the last one once more.
        assert len(line.commands) == 60
        assert line.commands == sorted(line.commands)


def test_a_single_action_is_one_command_where_it_comes_in_time() -> None:
    slow = ControlConfig(hz=0.01, deadline=100.0)
    clock = Skipping()
    with playing(slow, size=1, clock=clock, limit=3) as (env, line):
        env.reset()
        questions = env._questions
        assert questions is not None
        for number in range(3):
            # The next step is due, as its question is asked, only when 100 seconds have gone by.
            questions.answer(np.full(2, float(number)))
            if number < 2:
                clock.ahead += 100.0
                with questions._changed:
                    questions._changed.notify_all()
                told = questions.asked.get()
                assert not isinstance(told, BaseException)
                assert told.rewards == [1.0]
        assert env._told(questions).ended is not None
        assert line.commands == [0.0, 1.0, 2.0]


def test_all_calls_of_the_environment_are_in_one_thread_pictures_too() -> None:
    with playing(limit=20) as (env, line):
        env.reset()
        assert env.render().shape == (2, 2, 3)
        over = False
        while not over:
            over = env.step(chunk(1))[2]
            env.render()
        env.render()
    assert len(line.threads) == 1
    assert threading.get_ident() not in line.threads
    assert line.closed == 1


def test_in_a_pause_no_step_is_missed() -> None:
    clock = Skipping()
    with playing(clock=clock, limit=10_000) as (env, _):
        env.reset()
        env.step(chunk(0))
        env.pause()
        clock.ahead += 3600.0
        info = env.step(chunk(1))[4]
        assert info[CONTROL].steps < 100_000  # of 3,600,000


def test_without_a_pause_the_steps_of_a_late_answer_are_missed_and_counted() -> None:
    clock = Skipping()
    with playing(clock=clock, limit=10_000) as (env, _):
        env.reset()
        env.step(chunk(0))
        clock.ahead += 3600.0
        counts = env.step(chunk(1))[4][CONTROL]
        counts = counts.plus(env.step(chunk(2))[4][CONTROL])
        assert 3_599_990 <= counts.missed <= counts.steps


def test_a_missed_deadline_may_cut_the_episode_and_the_next_one_begins() -> None:
    clock = Skipping()
    control = ControlConfig(hz=100.0, on_late="stop")
    with playing(control, clock=clock, limit=10_000) as (env, line):
        env.reset()
        over = cut = False
        while not cut:
            clock.ahead += 3600.0
            _, _, over, cut, _ = env.step(chunk(1))
        assert not over
        env.reset()
        assert line.commands == []
        env.step(chunk(1))


def test_a_step_without_an_episode_is_an_error_and_waits_for_nothing() -> None:
    with playing(limit=1) as (env, _):
        with pytest.raises(RuntimeError, match="call reset before step"):
            env.step(chunk(0))
        env.reset()
        assert env.step(chunk(0))[2]
        with pytest.raises(RuntimeError, match="call reset before step"):
            env.step(chunk(0))


def test_an_emergency_ends_the_run_and_no_episode_follows() -> None:
    slot = Slot(
        RealTimeEnv(partial(Line, stops_at=3), FAST, 4), lambda *_: None, label="Line", seed=3
    )
    slot.reset(None)
    with pytest.raises(EnvFailed, match="EmergencyStop: the robot was stopped: the red button"):
        deque(iter(lambda: slot.step(chunk(0), None), None))
    with pytest.raises(EnvFailed, match="the red button"):
        slot.reset(None)
    slot.close()


def test_an_error_of_the_robot_is_raised_by_the_step_that_waits_for_it() -> None:
    with playing(breaks_at=5) as (env, _):
        env.reset()
        with pytest.raises(ZeroDivisionError, match="broke"):
            deque(iter(lambda: env.step(chunk(0)), None))
        env.reset()
        env.step(chunk(0))


def test_an_episode_that_is_left_leaves_the_robot_at_rest() -> None:
    control = ControlConfig(hz=1000.0, safety=SafetyConfig(rest=[7.0]))
    with playing(control) as (env, line):
        env.reset()
        env.step(chunk(5))
        commands = line.commands
        env.reset()
        assert commands[-1] == 7.0
        assert line.commands == []


def test_commands_keep_the_limits() -> None:
    control = ControlConfig(hz=1000.0, safety=SafetyConfig(high=[150.0], max_step=[10.0]))
    with playing(control, limit=40) as (env, line):
        env.reset()
        over, clipped = False, 0
        while not over:
            _, _, over, _, info = env.step(chunk(9))
            clipped += info[CONTROL].clipped
        assert max(line.commands) <= 150.0
        assert max(np.abs(np.diff(line.commands))) <= 10.0
        assert 0 < clipped <= 40


def test_a_length_counts_the_steps_of_the_robot() -> None:
    kwargs = {"limit": 20}
    env = make_env(
        EnvConfig(entry_point=MAKE, kwargs=kwargs, envs=1, stages=1, action_chunk=4, control=FAST)
    )
    slot = Slot(env, lambda *_: None, label="Line", seed=0)
    slot.reset(None)
    ended = None
    while ended is None:
        ended = slot.step(chunk(0), None)[3]
    assert (ended.length, ended.episode_return, ended.success) == (20, 20.0, True)
    slot.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"control": {"safety": {"low": [0.0] * 3}}}, "control.safety.low: 3 numbers, but an acti"),
        ({"control": {"every": 3}}, "control.every: 3 steps between two questions do not divide"),
        ({"simulator": "vector"}, "control.hz: 50, but simulator = 'vector' steps many"),
        ({"envs": 2}, "control.hz: 50, but with simulator = 'single' and envs = 2 in stages = 1"),
        ({"envs": 2, "stages": 2}, "control.hz: 50, but with simulator = 'single' and envs = 2 in"),
        ({"simulator": "pool", "envs": 2, "group_size": 2}, "control.hz: 50, but in real time no"),
    ],
)
def test_what_cannot_be_in_real_time_is_refused(settings: dict[str, Any], problem: str) -> None:
    control: dict[str, Any] = {"hz": 50.0, **settings.get("control", {})}
    if "safety" in control:
        control["safety"] = SafetyConfig(**control["safety"])
    whole = {"entry_point": MAKE, "envs": 1, "stages": 1, "action_chunk": 4, **settings}
    if whole.get("simulator") == "vector":
        whole["action_chunk"] = 1
    with pytest.raises(ConfigError) as caught:
        make_env(EnvConfig(**{**whole, "control": ControlConfig(**control)}))
    assert str(caught.value).startswith(problem)


def test_real_time_needs_a_box() -> None:
    one = {"envs": 1, "stages": 1, "control": FAST}
    with pytest.raises(ConfigError, match=r"^control.hz: 1000, but the action space is Discrete"):
        make_env(EnvConfig(id="CartPole-v1", **one))  # type: ignore[arg-type]  # as given


def test_what_the_environment_itself_gets_wrong_has_its_own_place() -> None:
    config = EnvConfig(entry_point=MAKE, kwargs={"no": 1}, envs=1, stages=1, control=FAST)
    with pytest.raises(Exception, match="no") as caught:
        make_env(config)
    assert "control" not in str(caught.value)
