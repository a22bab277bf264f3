"""A robot's loop in virtual time: which command it gets at each step under which delays."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import ControlCounts, all_counts
from rlinf_async.realtime import (
    ControlConfig,
    Controller,
    InThread,
    Limits,
    NothingToHold,
    RealTimeLoop,
    SafetyConfig,
    Shown,
    Stepped,
    limits_for,
    prioritised,
)

HZ = 10.0
NO_LIMITS = Limits(SafetyConfig(), 1 / HZ, 1)


class Space:
    """A Box, as far as a loop looks at it."""

    def __init__(self, low: float = -1e9, high: float = 1e9, size: int = 1) -> None:
        self.low, self.high = np.full(size, low), np.full(size, high)
        self.shape, self.dtype = (size,), np.dtype(np.float64)


class Time:
    """Seconds that pass when somebody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep_until(self, when: float) -> None:
        self.seconds = max(self.seconds, when)


class Delayed:
    """Answers after so many steps of time, the last delay for ever; action ``i`` of what was shown
    at step ``n`` is ``100 n + i``."""

    def __init__(self, time: Time, delays: list[float], chunk: int) -> None:
        self._time, self._delays, self._chunk = time, delays, chunk
        self.asked: list[Shown] = []

    def ask(self, shown: Shown) -> None:
        delay = self._delays[min(len(self.asked), len(self._delays) - 1)]
        self.asked.append(shown)
        self._ready_at = self._time.now() + delay / HZ

    def wait(self, until: float) -> Any:
        if self._ready_at > max(until, self._time.now()) + 1e-12:
            self._time.sleep_until(until)
            return None
        self._time.sleep_until(self._ready_at)
        return 100.0 * self.asked[-1].step + np.arange(self._chunk)


class Robot:
    """Keeps its commands; a step takes the next of ``busy`` (in steps), then none."""

    def __init__(self, time: Time, busy: list[float] | None = None) -> None:
        self.action_space = Space()
        self._time, self._busy = time, [*(busy or [])]
        self.commands: list[float] = []

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return 0.0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.commands.append(float(action[0]))
        if self._busy:
            self._time.sleep_until(self._time.now() + self._busy.pop(0) / HZ)
        return 0.0, 1.0, False, False, {}


def play(
    delays: list[float],
    *,
    chunk: int = 4,
    steps: int = 10,
    busy: list[float] | None = None,
    limits: Limits = NO_LIMITS,
    **config: Any,
) -> tuple[str, ControlCounts, list[Stepped]]:
    """The commands of an episode as text: ``shown+index`` of an action, ``hold``, ``late+index``
    where it was missed, ``-`` of a step that was skipped."""
    time = Time()
    control = ControlConfig(hz=HZ, **config)
    robot, taken = Robot(time, busy), list[Stepped]()
    loop = RealTimeLoop(
        robot,
        Delayed(time, delays, chunk),
        control,
        limits,
        every=control.steps_between(chunk),
        clock=time,
        on_step=taken.append,
    )
    counts = loop.run(steps)
    said = ["-"] * steps
    for one in taken:
        command = one.command
        said[command.step] = (
            f"{command.shown}+{command.number}" if command.source == "chunk" else command.source
        )
    assert robot.commands == [float(one.command.action[0]) for one in taken]  # type: ignore[index]
    return " ".join(said), counts, taken


@pytest.mark.parametrize(
    ("settings", "delays", "commands", "missed", "stale"),
    [
        # At once, and with delays below a chunk less the steps between two questions: none missed.
        ({"chunk": 1}, [0.0], "0+0 1+0 2+0 3+0 4+0 5+0 6+0 7+0 8+0 9+0", 0, 0),
        ({"chunk": 1}, [0.5], "0+0 1+0 2+0 3+0 4+0 5+0 6+0 7+0 8+0 9+0", 0, 0),
        ({}, [0.0], "0+0 0+1 0+2 2+1 2+2 4+1 4+2 6+1 6+2 8+1", 0, 0),
        ({}, [0.4], "0+0 0+1 0+2 2+1 2+2 4+1 4+2 6+1 6+2 8+1", 0, 0),
        ({}, [1.0], "0+0 0+1 0+2 2+1 2+2 4+1 4+2 6+1 6+2 8+1", 0, 0),
        ({}, [1.5], "0+0 0+1 0+2 0+3 2+2 2+3 4+2 4+3 6+2 6+3", 0, 0),
        ({}, [2.0], "0+0 0+1 0+2 0+3 2+2 2+3 4+2 4+3 6+2 6+3", 0, 0),
        # It comes half a step after step 4 is due, which waits for it: until its deadline. The next
        # question is half a step late, too.
        ({}, [2.5], "0+0 0+1 0+2 0+3 2+2 2+3 hold 4+3 hold 7+2", 2, 0),
        # Too slow: one action of each chunk is left.
        ({}, [3.0], "0+0 0+1 0+2 0+3 hold 2+3 hold hold 5+3 hold", 4, 0),
        ({"on_late": "chunk"}, [3.0], "0+0 0+1 0+2 0+3 hold 2+3 hold hold 5+3 hold", 4, 0),
        # Slower than a chunk is long: all of its steps have gone by when it comes.
        ({}, [5.0], "0+0 0+1 0+2 0+3 hold hold hold hold hold hold", 6, 1),
        (
            {"on_late": "chunk"},
            [5.0],
            "0+0 0+1 0+2 0+3 hold hold hold 2+0 2+1 2+2",
            6,
            1,
        ),
        ({"on_late": "stop"}, [5.0], "0+0 0+1 0+2 0+3 stopped - - - - -", 1, 0),
        # Asked less often.
        ({"every": 4}, [0.0], "0+0 0+1 0+2 0+3 4+0 4+1 4+2 4+3 8+0 8+1", 0, 0),
        ({"every": 4}, [1.0], "0+0 0+1 0+2 0+3 hold 4+1 4+2 4+3 hold 8+1", 2, 0),
        ({"every": 1}, [1.0], "0+0 0+1 1+1 2+1 3+1 4+1 5+1 6+1 7+1 8+1", 0, 0),
        # One answer in between is late.
        (
            {},
            [0.0, 1.0, 6.0, 0.0],
            "0+0 0+1 0+2 2+1 2+2 2+3 hold hold hold hold",
            4,
            0,
        ),
        ({"deadline": 0.0}, [0.5], "0+0 0+1 0+2 2+1 2+2 4+1 4+2 6+1 6+2 8+1", 0, 0),
        (
            {"deadline": 0.0, "chunk": 1},
            [0.5],
            "0+0 hold hold hold hold hold hold hold hold hold",
            9,
            8,  # the last has not come yet
        ),
    ],
)
def test_which_action_the_robot_gets_at_which_step(
    settings: dict[str, Any], delays: list[float], commands: str, missed: int, stale: int
) -> None:
    # The first answer is waited for: step 0 is due when it comes.
    said, counts, _ = play(delays, **settings)
    assert (said, counts.missed, counts.stale_answers) == (commands, missed, stale)


@pytest.mark.parametrize(
    ("busy", "commands", "late", "skipped"),
    [
        ([0.9], "0+0 0+1 0+2 2+1 2+2 4+1", 0, 0),
        ([1.5], "0+0 0+1 0+2 2+1 2+2 4+1", 0, 0),  # right at the deadline
        ([1.6], "0+0 0+1 0+2 2+1 2+2 4+1", 1, 0),
        ([2.0], "0+0 - 0+2 2+1 2+2 4+1", 0, 1),
        ([3.7], "0+0 - - 0+3 3+1 3+2", 1, 2),
        ([3.7, 1.9], "0+0 - - 0+3 - 3+2", 2, 3),
        ([99.0], "0+0 - - - - hold", 0, 4),
    ],
)
def test_a_robot_that_is_busy_for_longer_than_a_step_skips_steps_and_does_not_catch_up(
    busy: list[float], commands: str, late: int, skipped: int
) -> None:
    said, counts, taken = play([0.5], steps=6, busy=busy)
    assert (said, counts.late, counts.skipped) == (commands, late, skipped)
    assert counts.steps == 6
    sent = [one.sent for one in taken]
    assert all(later - sooner >= 0.05 / HZ for sooner, later in pairwise(sent))


def test_a_step_is_stamped_with_when_it_was_due_and_sent() -> None:
    _, counts, taken = play([0.0, 0.0, 2.3], chunk=1, steps=4, busy=[1.2])
    assert [one.due * HZ for one in taken] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    # Step 2 waited for its answer until its deadline; so did step 3, where it came.
    assert [one.sent * HZ for one in taken] == pytest.approx([0.0, 1.2, 2.5, 3.5])
    assert counts.jitter_max * HZ == pytest.approx(0.2)
    assert counts.jitter_sum * HZ == pytest.approx(0.2)
    assert (counts.answers, counts.answer_max) == (2, 0.0)


LIMITED = SafetyConfig(low=[-2.0], high=[2.0], max_step=[0.5])


@given(
    st.lists(st.one_of(st.floats(0.0, 3.0), st.floats(0.0, 30.0)), min_size=1, max_size=20),
    st.lists(st.floats(0.0, 5.0), max_size=10),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (8, 2)]),
    st.sampled_from(["hold", "chunk", "stop"]),
    st.sampled_from([None, 0.0, 0.1]),
    st.booleans(),
    st.sampled_from(["clip", "refuse"]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_late_each_step_is_counted_once_and_no_command_is_beyond_a_limit(
    delays: list[float],
    busy: list[float],
    sizes: tuple[int, int],
    on_late: Any,
    deadline: float | None,
    rests: bool,
    beyond: Any,
) -> None:
    safety = SafetyConfig(
        low=LIMITED.low,
        high=LIMITED.high,
        max_step=LIMITED.max_step,
        beyond=beyond,
        rest=[0.0] if rests else [],
    )
    _, counts, taken = play(
        delays,
        chunk=sizes[0],
        every=sizes[1],
        steps=30,
        busy=busy,
        limits=Limits(safety, 1 / HZ, 1),
        on_late=on_late,
        deadline=deadline,
    )
    commands = [one.command for one in taken]
    # Every step that began has one command, in order, and the others are counted as skipped.
    numbers = [one.step for one in commands]
    assert numbers == sorted(set(numbers))
    assert counts.steps == len(taken) + counts.skipped
    # Each miss is counted once: a step without an action of its own is starved, and not late.
    patience = 0.5 / HZ if deadline is None else deadline
    meant = [one.source == "chunk" and one.shown + one.number == one.step for one in commands]
    held = counts.refused + sum(one.source == "stopped" for one in commands)
    assert len(commands) - sum(meant) - held <= counts.starved <= len(commands) - sum(meant)
    assert counts.late <= sum(one.sent - one.due > patience + 1e-9 for one in taken)
    assert counts.missed <= counts.steps
    # No chunk acts after a newer one, and each of its actions once at most.
    acted = [(one.shown, one.number) for one in commands if one.source == "chunk"]
    assert acted == sorted(set(acted))
    # A chunk acts only after it was shown what it answers.
    assert all(one.step >= one.shown for one in commands)
    last: float | None = None
    for one in commands:
        assert one.action is not None
        value = float(one.action[0])
        assert -2.0 <= value <= 2.0
        if last is not None and not (rests and one.source != "chunk"):
            assert abs(value - last) <= 0.5 + 1e-9
        last = value
    # Who has stopped stays stopped.
    if on_late == "stop" and counts.missed:
        assert commands[-1].source == "stopped"
        assert all(one.source != "stopped" for one in commands[:-1])
    else:
        assert all(one.source != "stopped" for one in commands)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("arrived"), st.integers(0, 12), st.integers(1, 6)),
            st.tuples(st.just("command"), st.integers(1, 3), st.booleans()),
            st.tuples(st.just("stop"), st.just(0), st.just(0)),
            st.tuples(st.just("begin"), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=6, max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_a_controller_sends_nothing_unsafe_whatever_comes_in_whichever_order(
    calls: list[tuple[str, int, Any]], values: list[float]
) -> None:
    controller = Controller(ControlConfig(hz=HZ), Limits(LIMITED, 1 / HZ, 1))
    step, newest, last, stopped, commands = 0, -1, None, False, 0
    for what, number, more in calls:
        if what == "arrived":
            controller.arrived(number, np.array(values[:more]).reshape(-1, 1), step)
        elif what == "stop":
            controller.stop("pressed")
            stopped = True
        elif what == "begin":
            controller.begin()
            newest, last = -1, None
        else:
            step += number
            command = controller.command(step, late=more)
            commands += 1
            assert command.step == step
            assert (command.source == "stopped") == stopped == bool(controller.stopped)
            if command.source == "chunk":
                assert command.shown >= newest
                newest = command.shown
            if command.action is not None:
                [value] = command.action
                assert -2.0 <= value <= 2.0
                assert last is None or abs(value - last) <= 0.5 + 1e-9
                last = value
    assert controller.counts.steps == commands
    assert controller.counts.starved + controller.counts.late <= commands
    controller.release()
    assert not controller.stopped


def limited(
    safety: SafetyConfig, *wanted: float, at: float | None = None
) -> tuple[str, Controller]:
    """What becomes of these commands, one after the other."""
    controller = Controller(ControlConfig(hz=HZ, safety=safety), Limits(safety, 1 / HZ, 1))
    controller.begin(at)
    controller.arrived(0, np.array(wanted).reshape(-1, 1), 0)
    made = [controller.command(step) for step in range(len(wanted))]
    return " ".join("-" if one.action is None else f"{one.action[0]:g}" for one in made), controller


@pytest.mark.parametrize(
    ("safety", "at", "wanted", "sent", "clipped", "refused"),
    [
        ({"high": [1.0]}, None, (0.5, 3.0, 1.0), "0.5 1 1", 1, 0),
        ({"low": [-1.0]}, None, (-3.0, 0.0), "-1 0", 1, 0),
        ({"max_step": [0.5]}, None, (0.0, 3.0, 0.9), "0 0.5 0.9", 1, 0),
        ({"max_step": [0.5]}, 2.0, (0.0, 1.5), "1.5 1.5", 1, 0),
        ({"max_velocity": [5.0]}, None, (0.0, 3.0, 0.9), "0 0.5 0.9", 1, 0),  # a step is 0.1 s
        ({"max_velocity": [5.0], "max_step": [0.2]}, None, (0.0, 3.0), "0 0.2", 1, 0),
        ({"high": [1.0], "beyond": "refuse"}, None, (0.5, 3.0, 0.7), "0.5 0.5 0.7", 0, 1),
        ({"high": [1.0], "beyond": "refuse"}, None, (3.0, 0.7), "- 0.7", 0, 1),
        ({"high": [1.0], "beyond": "refuse", "rest": [0.0]}, None, (3.0, 0.7), "0 0.7", 0, 1),
        ({}, None, (0.5, math.nan, math.inf, 0.7), "0.5 0.5 0.5 0.7", 0, 2),
        ({"rest": [0.0]}, None, (0.5, math.nan, 0.7), "0.5 0 0.7", 0, 1),
    ],
)
def test_what_becomes_of_a_command_beyond_a_limit(
    safety: dict[str, Any],
    at: float | None,
    wanted: tuple[float, ...],
    sent: str,
    clipped: int,
    refused: int,
) -> None:
    said, controller = limited(SafetyConfig(**safety), *wanted, at=at)
    counts = controller.counts
    assert (said, counts.clipped, counts.refused) == (sent, clipped, refused)


def test_an_emergency_holds_the_robot_and_outlives_the_episode() -> None:
    said, controller = limited(SafetyConfig(rest=[0.0]), 0.5, 0.6)
    assert said == "0.5 0.6"
    controller.stop("pressed")
    controller.stop("pressed again")
    assert controller.command(2) == (2, np.zeros(1), "stopped", -1, -1)
    controller.begin()
    controller.arrived(0, [[0.5]], 0)
    assert (controller.command(0).source, controller.stopped) == ("stopped", "pressed")
    controller.release()
    controller.begin()
    controller.arrived(0, [[0.5]], 0)
    assert controller.command(0).source == "chunk"


def test_a_missed_deadline_that_stops_ends_only_the_episode() -> None:
    controller = Controller(ControlConfig(hz=HZ, on_late="stop"), NO_LIMITS)
    controller.begin()
    assert controller.command(0).source == "stopped"
    controller.begin()
    controller.arrived(0, [[0.5]], 0)
    assert controller.command(0).source == "chunk"


class Fails(Robot):
    """Says after three steps that somebody has stopped it, or raises."""

    def __init__(self, time: Time, *, stops: bool) -> None:
        super().__init__(time)
        self._stops = stops

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        taken = super().step(action)
        third = len(self.commands) == 3
        if third and not self._stops:
            raise ZeroDivisionError("the robot broke")
        return *taken[:4], {"emergency_stop": third, "reason": "the red button"}


def looped(robot: Robot, time: Time, answers: Any, safety: SafetyConfig) -> RealTimeLoop:
    config = ControlConfig(hz=HZ, safety=safety)
    limits = limits_for(config, robot.action_space)
    return RealTimeLoop(robot, answers, config, limits, every=1, clock=time)


def test_a_robot_that_says_it_was_stopped_gets_one_more_command_and_holds() -> None:
    time = Time()
    robot = Fails(time, stops=True)
    loop = looped(robot, time, Delayed(time, [0.0], 1), SafetyConfig(rest=[7.0]))
    loop.run(10)
    assert robot.commands == [0.0, 100.0, 200.0, 7.0]
    assert loop.controller.emergency == "the red button"
    loop.run(10)  # holds from its first step on
    assert robot.commands[4:] == [7.0]


def test_a_policy_that_raises_leaves_the_robot_at_rest() -> None:
    class Raises(Delayed):
        def wait(self, until: float) -> Any:
            if self.asked[-1].step == 2:
                raise FloatingPointError("no answer")
            return super().wait(until)

    time = Time()
    robot = Robot(time)
    loop = looped(robot, time, Raises(time, [0.0], 1), SafetyConfig(rest=[7.0]))
    with pytest.raises(FloatingPointError, match="no answer"):
        loop.run(10)
    assert robot.commands == [0.0, 100.0, 7.0]


def test_a_robot_that_raises_gets_the_command_of_rest() -> None:
    time = Time()
    robot = Fails(time, stops=False)
    loop = looped(robot, time, Delayed(time, [0.0], 1), SafetyConfig(rest=[7.0]))
    with pytest.raises(ZeroDivisionError, match="broke"):
        loop.run(10)
    assert robot.commands == [0.0, 100.0, 200.0, 7.0]


def test_a_policy_computes_in_a_thread_and_a_step_does_not_wait_for_it() -> None:
    going, here = threading.Event(), Future[Any]()

    def act(observation: Any) -> Any:
        here.set_result(threading.current_thread())
        assert going.wait(60.0)
        return [observation]

    answers = InThread(act)
    answers.ask(Shown(0, 0.0, 3.0))
    assert here.result(60.0) is not threading.current_thread()
    assert answers.wait(-math.inf) is None
    going.set()
    assert answers.wait(math.inf) == [3.0]
    answers.close()


def test_an_error_of_the_policy_is_raised_where_it_is_waited_for() -> None:
    def act(observation: Any) -> Any:
        raise TimeoutError("its own")

    answers = InThread(act)
    answers.ask(Shown(0, 0.0, 3.0))
    with pytest.raises(TimeoutError, match="its own"):
        answers.wait(math.inf)
    answers.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hz": -1.0}, "hz: -1 must lie between 0 and 1000"),
        ({"hz": math.nan}, "hz: nan must lie"),
        ({"every": 2}, "every: is set, but without hz there is no real time"),
        ({"on_late": "stop"}, "on_late: is set, but without hz"),
        ({"safety": SafetyConfig(low=[1.0])}, "safety: is set, but without hz"),
        ({"hz": 50.0, "every": -1}, "every: -1 must be at least 0"),
        ({"hz": 50.0, "priority": 100}, "priority: 100 must lie between 0 and 99"),
        ({"hz": 50.0, "deadline": 0.021}, "deadline: 0.021 must lie between 0 and the 0.02 sec"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControlConfig(**settings)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"low": [0.0, 1.0]}, "safety.low: 2 numbers, but an action has 3"),
        ({"high": [-2.0]}, "safety.low: -1 is above the -2 that number 0"),
        ({"rest": [0.0, 0.0, 2.0]}, "safety.rest: [0.0, 0.0, 2.0] lies outside of the limits"),
    ],
)
def test_limits_that_do_not_fit_an_action_are_named(settings: dict[str, Any], problem: str) -> None:
    config = ControlConfig(hz=HZ, safety=SafetyConfig(**settings))
    with pytest.raises(ConfigError) as caught:
        limits_for(config, Space(-1.0, 1.0, size=3))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("setting", ["low", "high", "max_step", "max_velocity", "rest"])
def test_a_limit_is_a_finite_number(setting: str) -> None:
    wrong: dict[str, Any] = {setting: [math.nan]}
    with pytest.raises(ConfigError, match=f"^{setting}: .* finite"):
        SafetyConfig(**wrong)


def test_real_time_is_for_a_box() -> None:
    with pytest.raises(ConfigError, match=r"^hz: 10, but the action space is \d+"):
        limits_for(ControlConfig(hz=HZ), 5)


@pytest.mark.parametrize(("chunk", "every"), [(1, 1), (2, 1), (5, 1), (6, 3), (8, 4), (9, 3)])
def test_questions_are_asked_every_half_chunk(chunk: int, every: int) -> None:
    assert ControlConfig(hz=HZ).steps_between(chunk) == every


def test_questions_that_do_not_divide_a_chunk_are_refused() -> None:
    with pytest.raises(ConfigError, match="every: 3 steps between two questions do not divide"):
        ControlConfig(hz=HZ, every=3).steps_between(8)


def test_a_priority_is_that_of_the_thread_while_the_block_lasts_or_refused() -> None:
    before = os.sched_getscheduler(0)
    problem = ""
    try:
        with prioritised(1):
            assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
            [policy] = ThreadPoolExecutor(1).map(os.sched_getscheduler, [0])
            assert policy == os.SCHED_OTHER
    except ConfigError as error:
        problem = str(error)
    assert problem == "" or problem.startswith("priority: 1, but this process must not")
    assert os.sched_getscheduler(0) == before


def test_counts_add_up() -> None:
    one = ControlCounts(steps=4, starved=1, late=1, jitter_sum=0.5, jitter_max=0.3, answers=2)
    two = ControlCounts(steps=6, skipped=1, jitter_sum=0.5, jitter_max=0.2, answer_max=0.1)
    both = all_counts([one, None, two])
    assert both is not None
    assert (both.steps, both.missed, both.jitter_max, both.answer_max) == (10, 3, 0.3, 0.1)
    assert both.metrics()["control_jitter_ms"] == pytest.approx(1000.0 / 9)
    assert all_counts([None]) is None


def test_commands_that_are_all_refused_end_the_loop() -> None:
    time = Time()
    robot = Robot(time)
    safety = SafetyConfig(low=[1e9], beyond="refuse")
    with pytest.raises(NothingToHold, match="the first 100 commands were all refused"):
        looped(robot, time, Delayed(time, [0.0], 1), safety).run(200)
    assert robot.commands == []


def test_episodes_whose_first_command_is_refused_do_not_add_up() -> None:
    time = Time()
    safety = SafetyConfig(low=[50.0], beyond="refuse")
    loop = looped(Robot(time), time, Delayed(time, [0.0], 1), safety)
    for _ in range(120):
        assert loop.run(3).refused == 1


def test_a_first_command_that_is_refused_leaves_the_robot_as_it_is_and_the_loop_goes_on() -> None:
    time = Time()
    robot = Robot(time)
    safety = SafetyConfig(low=[50.0], beyond="refuse")
    loop = looped(robot, time, Delayed(time, [0.0], 1), safety)
    counts = loop.run(3)
    assert robot.commands == [100.0, 200.0]
    assert (counts.steps, counts.refused, counts.missed) == (3, 1, 0)
