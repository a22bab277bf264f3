"""A robot in real time: which command it gets at which step, whoever answers late.

::

    step        0   1   2   3   4   5   6   7   8   9
    asked       o       o       o           o
    answered    [0  1   2   3]                             a chunk of 4 actions; `every` 2 steps
                        .  [3   4   5]                 from step 2 on; one step late: 2 has gone
                                .   .  [7]             from step 4 on; late: step 6 got none

Action ``i`` of a chunk that was computed from what was shown at step ``n`` is meant for step
``n + i``. While the next chunk is computed the robot goes on with this one; when it comes, its
actions for steps that have gone by are left out, and of two chunks the newer one counts. (Nothing
is blended or inpainted where one chunk follows another.)

Each step has a deadline. A step for which there is no action when it is due waits for one until
then, and has missed it if none comes; so has a step that begins too late, because the robot or this
host was busy. What the robot then gets, ``on_late`` says.

Invariants: a step has at most one command, and one that was missed is counted once; a command from
a chunk lies within the limits; no chunk acts after a newer one; who has stopped stays stopped.

`Controller` has no clock: it knows steps by their numbers. `RealTimeLoop` has one, which tests and
simulations replace. The policy answers somewhere else (`Answers`), such as in a thread: a slow one
never holds up a step. Nothing here imports torch, channels or workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import ControlCounts

Row = NDArray[np.float64]
OnLate = Literal["hold", "chunk", "stop"]

EMERGENCY: Final = "emergency_stop"
"""key in the info of a step: True where the robot, or who watches it, has stopped it"""
MOST_HZ: Final = 1000.0
MOST_REFUSED: Final = 100
"""commands that may be refused before the robot has had any"""


class SafetyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the commands that a robot gets, in its units: one number for all, or one each."""

    low: list[float] = []
    """smallest command, such as the lower limits of joints; empty: the environment's bound"""
    high: list[float] = []
    """largest command; empty: the environment's bound"""
    max_step: list[float] = []
    """largest change from one command to the next; empty: no limit"""
    max_velocity: list[float] = []
    """largest change of a command in a second; empty: no limit"""
    beyond: Literal["clip", "refuse"] = "clip"
    """a command beyond a limit is clipped to it, or refused: the robot holds; both are counted"""
    rest: list[float] = []
    """the command with which the robot holds, such as zeros for velocities; empty: its last one,
    for commands that are positions"""

    def __post_init__(self) -> None:
        for name in ("low", "high", "max_step", "max_velocity", "rest"):
            values = getattr(self, name)
            if not all(math.isfinite(one) for one in values):
                raise ConfigError(f"{values} has to be finite numbers", path=(name,))
            if name.startswith("max_") and not all(one > 0.0 for one in values):
                raise ConfigError(f"{values} has to be above 0", path=(name,))


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The real time of a robot's loop."""

    hz: float = 0.0
    """commands in a second; 0: a step takes as long as it takes, and nothing here has an effect"""
    every: int = 0
    """steps between two questions to the policy, while it answers in time: a divisor of the actions
    of a chunk; 0: the largest up to half of them"""
    deadline: float | None = None
    """seconds after a step is due until which its command has to be sent; None: half a period"""
    priority: int = 0
    """priority of the loop's thread among real-time ones (SCHED_FIFO, 1 to 99), so that nothing
    else on a busy host holds it up; 0: that of any thread"""
    on_late: OnLate = "hold"
    """what follows a step for which there is no action in time: ``hold``, the robot holds;
    ``chunk``, it goes on with the newest chunk, though that is late; ``stop``, the episode ends"""
    safety: SafetyConfig = SafetyConfig()

    def __post_init__(self) -> None:
        if not 0.0 <= self.hz <= MOST_HZ:
            raise ConfigError(f"{self.hz:g} must lie between 0 and {MOST_HZ:g}", path=("hz",))
        if not self.hz:
            for field in msgspec.structs.fields(self):
                if getattr(self, field.name) != field.default and field.name != "hz":
                    raise ConfigError(
                        "is set, but without hz there is no real time: set hz, the commands in a "
                        "second, or leave it out",
                        path=(field.name,),
                    )
            return
        if self.every < 0:
            raise ConfigError(f"{self.every} must be at least 0", path=("every",))
        if not 0 <= self.priority <= 99:
            raise ConfigError(f"{self.priority} must lie between 0 and 99", path=("priority",))
        if self.deadline is not None and not 0.0 <= self.deadline <= self.period:
            raise ConfigError(
                f"{self.deadline} must lie between 0 and the {self.period:g} seconds of a step "
                f"(hz = {self.hz:g})",
                path=("deadline",),
            )

    @property
    def period(self) -> float:
        """Seconds of a step."""
        return 1.0 / self.hz

    @property
    def patience(self) -> float:
        """Seconds from the time at which a step is due to its deadline."""
        return self.period / 2 if self.deadline is None else self.deadline

    def steps_between(self, chunk: int) -> int:
        """Return the steps between two questions, for chunks of so many actions.

        Raises:
            ConfigError: ``every`` does not divide them.
        """
        if not self.every:
            return max(one for one in range(1, max(chunk // 2, 1) + 1) if not chunk % one)
        if chunk % self.every:
            raise ConfigError(
                f"{self.every} steps between two questions do not divide the {chunk} actions of a "
                "chunk: take a divisor of them, or leave it out",
                path=("every",),
            )
        return self.every


class Limits:
    """The limits of commands of ``size`` numbers, and whether one keeps them.

    Raises:
        ConfigError: the settings have other sizes, or contradict each other.
    """

    def __init__(
        self,
        safety: SafetyConfig,
        period: float,
        size: int,
        low: Any = -math.inf,
        high: Any = math.inf,
    ) -> None:
        """``low`` and ``high`` are the bounds of the action space."""

        def each(name: str, values: list[float], default: Any) -> Row:
            if values and len(values) not in (1, size):
                raise ConfigError(
                    f"{len(values)} numbers, but an action has {size}: give one for all, or {size}",
                    path=(name,),
                )
            given = np.asarray(values if values else default, np.float64)
            return np.broadcast_to(given.reshape(-1), size).copy()

        self.low = each("low", safety.low, low)
        self.high = each("high", safety.high, high)
        speed = each("max_velocity", safety.max_velocity, math.inf) * period
        self.step = np.minimum(each("max_step", safety.max_step, math.inf), speed)
        self.clips = safety.beyond == "clip"
        self.rest = each("rest", safety.rest, 0.0) if safety.rest else None
        if not (self.low <= self.high).all():
            first = int(np.argmin(self.low <= self.high))
            raise ConfigError(
                f"{self.low[first]:g} is above the {self.high[first]:g} that number {first} of a "
                "command may be at most",
                path=("low",),
            )
        if self.rest is not None and self.beyond(self.rest, None):
            raise ConfigError(
                f"{safety.rest} lies outside of the limits {self.low.tolist()} to "
                f"{self.high.tolist()}",
                path=("rest",),
            )

    def beyond(self, command: Row, last: Row | None) -> bool:
        """Whether a command that follows ``last`` is beyond a limit, or not finite."""
        # A command that is the last one and a step of the limit may round to a bit more.
        inside = (self.low <= command) & (command <= self.high)
        if last is not None:
            inside &= np.abs(command - last) <= self.step * (1.0 + 1e-9) + 1e-12
        return not bool(inside.all() and np.isfinite(command).all())

    def clipped(self, command: Row, last: Row | None) -> Row:
        """The nearest command within the limits."""
        kept = np.clip(command, self.low, self.high)
        if last is not None:
            kept = np.clip(kept, last - self.step, last + self.step)
            kept = np.clip(kept, self.low, self.high)
        return kept


class NothingToHold(RuntimeError):
    """All commands were refused before the robot had any: it would wait for ever."""


class Command(NamedTuple):
    """What the robot gets at one step."""

    step: int
    action: Row | None
    """``[A]``; None: nothing is sent, since there is nothing to hold yet"""
    source: Literal["chunk", "hold", "stopped"]
    shown: int = -1
    """step at which was shown what the action's chunk was computed from; -1: of no chunk"""
    number: int = -1
    """number of the action in its chunk"""


class Controller:
    """The commands of a robot, step by step; it has no clock.

    Args:
        config: what follows a missed step.
        limits: those of a command.
    """

    def __init__(self, config: ControlConfig, limits: Limits) -> None:
        self._on_late, self._limits = config.on_late, limits
        self.counts = ControlCounts()
        """counts since they were last taken by `take_counts`"""
        # Two places, for another thread may stop what this one begins.
        self.emergency = ""
        """the reason of an emergency, which only `release` ends; empty: there is none"""
        self.begin()

    @property
    def stopped(self) -> str:
        """Why nothing goes on; empty: it does."""
        return self.emergency or self._ended

    def begin(self, at: Any = None) -> None:
        """Begin an episode: no chunk is left of the last one, nor a stop that was no emergency.

        ``at`` is the command at which the robot stands, where that is known: the first one's change
        is limited, too.
        """
        self._chunk: Row = np.empty((0, 0))
        self._shown, self._next, self._unmoved = -1, 0, 0
        self._last: Row | None = None if at is None else np.asarray(at, np.float64).reshape(-1)
        self._ended = ""

    def stop(self, reason: str) -> None:
        """An emergency: from the next command on the robot holds, until `release`. May be called
        in any thread."""
        self.emergency = self.emergency or reason

    def release(self) -> None:
        """End an emergency: somebody has looked at the robot."""
        self.emergency = ""

    def arrived(self, shown: int, chunk: Any, step: int) -> None:
        """Take a chunk ``[k, A]``, or one action ``[A]``, that was computed from what was shown at
        step ``shown`` and comes before ``step``. One that is older than the newest is left out."""
        rows = np.asarray(chunk, np.float64).reshape(-1, len(self._limits.low))
        self.counts.answers += 1
        if shown <= self._shown:
            self.counts.stale_answers += 1
            return
        if step >= shown + len(rows):
            self.counts.stale_answers += 1
        self._chunk, self._shown, self._next = rows, shown, 0

    def ready(self, step: int) -> bool:
        """Whether there is an action for this step."""
        return 0 <= step - self._shown < len(self._chunk)

    def skip(self, steps: int) -> None:
        """Count steps that got no command, because their time has gone by."""
        self.counts.steps += steps
        self.counts.skipped += steps
        if steps and self._on_late == "stop":
            self._ended = f"{steps} steps have gone by without a command"

    def command(self, step: int, *, late: bool = False) -> Command:
        """Return the one command of this step; ``late``: its deadline is over."""
        self.counts.steps += 1
        ready = self.ready(step)
        self.counts.starved += not ready
        self.counts.late += late and ready
        if self._on_late == "stop" and (late or not ready):
            self._ended = f"step {step} has missed its deadline"
        if self.stopped:
            return Command(step, self._held(), "stopped")
        index = step - self._shown if ready else self._next
        if not ready and (self._on_late != "chunk" or index >= len(self._chunk)):
            return Command(step, self._held(), "hold")
        self._next = index + 1
        wanted = self._chunk[index]
        if self._limits.beyond(wanted, self._last):
            if not (self._limits.clips and np.isfinite(wanted).all()):
                self.counts.refused += 1
                held = self._held()
                self._unmoved = 0 if held is not None else self._unmoved + 1
                if self._unmoved == MOST_REFUSED:
                    raise NothingToHold(
                        f"the first {MOST_REFUSED} commands were all refused, the last "
                        f"{wanted.tolist()}, and the robot has none to hold: set safety.rest, or "
                        "other limits"
                    )
                return Command(step, held, "hold")
            self.counts.clipped += 1
            wanted = self._limits.clipped(wanted, self._last)
        self._last = wanted
        return Command(step, wanted.copy(), "chunk", self._shown, index)

    def _held(self) -> Row | None:
        if self._limits.rest is not None:
            self._last = self._limits.rest
        return None if self._last is None else self._last.copy()

    def take_counts(self) -> ControlCounts:
        """Return the counts since the last time."""
        counts, self.counts = self.counts, ControlCounts()
        return counts


@contextlib.contextmanager
def prioritised(priority: int) -> Iterator[None]:
    """Give the calling thread this real-time priority while the block lasts; not what it starts.

    Raises:
        ConfigError: this process must not, or the system has no such priorities.
    """
    if not priority:
        yield
        return
    try:
        # Of the calling thread alone, though the system calls it that of a process.
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"{priority}, but this process must not have a real-time priority ({error}): give it "
            "CAP_SYS_NICE or a limit (ulimit -r), or leave it out",
            path=("priority",),
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # without CAP_SYS_NICE there may be no way back
            os.sched_setscheduler(0, *before)


class Clock(Protocol):
    """Seconds, and waiting for some."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...


class WallClock:
    """The monotonic clock."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def sleep_until(self, when: float) -> None:
        """Wait."""
        if (left := when - time.monotonic()) > 0.0:
            time.sleep(left)


class Shown(NamedTuple):
    """What a robot showed, with its time."""

    step: int
    time: float
    """seconds of the loop's clock"""
    observation: Any


class Answers(Protocol):
    """Where a policy answers: one question at a time is open."""

    def ask(self, shown: Shown) -> None:
        """Ask; does not wait."""
        ...

    def wait(self, until: float) -> Any:
        """Return the answer to the open question, ``[k, A]`` or ``[A]``, as soon as it is there;
        None if it is not by then. ``until`` is a time of the loop's clock, or infinite."""
        ...


class InThread:
    """`Answers` of a function that computes in a thread, or wherever an executor has it computed.

    Args:
        act: an observation to an action ``[A]`` or a chunk ``[k, A]``.
        executor: such as ``ProcessPoolExecutor(1)``, where ``act`` is a function of a module and
            keeps Python's interpreter to itself; None: a thread of its own.
    """

    def __init__(
        self,
        act: Callable[[Any], Any],
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._act, self._clock = act, clock
        self._own = None if executor else ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._executor: Executor = executor or self._own  # type: ignore[assignment]
        self._open: Future[Any] | None = None

    def ask(self, shown: Shown) -> None:
        """Begin to compute."""
        self._open = self._executor.submit(self._act, shown.observation)

    def wait(self, until: float) -> Any:
        """Return the answer; raises what the policy raised."""
        if self._open is None:
            return None
        left = None if until == math.inf else max(until - self._clock(), 0.0)
        try:
            return self._open.result(left)
        except NotYet:
            if self._open.done():  # the policy's own error, of the same type
                raise
            return None

    def close(self) -> None:
        """End the thread, once what it computes is done."""
        if self._own is not None:
            self._own.shutdown()


class Stepped(NamedTuple):
    """A step that was taken."""

    command: Command
    due: float
    """seconds of the loop's clock at which it was due"""
    sent: float
    """when its command was sent"""
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class RealTimeLoop:
    """The loop of a robot at ``config.hz``.

    ::

        with RealTimeLoop.of(robot, policy.act, hz=50) as loop:
            counts = loop.run(steps=500)

    Args:
        robot: has ``reset()`` and ``step(action)`` as a Gymnasium environment, and does not wait in
            ``step``: time is kept here. Where it has ``observe()``, that is called when a step is
            due; else what the last step returned is what it shows.
        answers: where the policy computes.
        config: the times, and what follows a missed step.
        limits: those of a command.
        every: steps between two questions.
        clock: the time.
        on_step: called after each step, in the loop's thread; True ends the episode.
    """

    def __init__(
        self,
        robot: Any,
        answers: Answers,
        config: ControlConfig,
        limits: Limits,
        *,
        every: int,
        clock: Clock | None = None,
        on_step: Callable[[Stepped], object] | None = None,
    ) -> None:
        self.robot, self._answers, self._config, self._every = robot, answers, config, every
        self._clock = clock or WallClock()
        self._on_step = on_step
        self.controller = Controller(config, limits)
        self._rest = limits.rest
        self._look = getattr(robot, "observe", None)
        self._open: Shown | None = None
        self._asked, self._seen_at = 0, 0.0

    @classmethod
    def of(
        cls,
        robot: Any,
        act: Callable[[Any], Any],
        *,
        hz: float,
        chunk: int = 1,
        every: int = 0,
        deadline: float | None = None,
        priority: int = 0,
        on_late: OnLate = "hold",
        safety: SafetyConfig | None = None,
        executor: Executor | None = None,
        on_step: Callable[[Stepped], object] | None = None,
    ) -> RealTimeLoop:
        """Return a loop whose policy computes in a thread, or in ``executor``; ``chunk`` actions
        are what ``act`` answers with (``policy.chunk``). The others are those of `ControlConfig`.

        Raises:
            ConfigError: a setting is wrong, or does not fit the robot's actions.
        """
        config = ControlConfig(
            hz=hz,
            every=every,
            deadline=deadline,
            priority=priority,
            on_late=on_late,
            safety=safety or SafetyConfig(),
        )
        if not hz:
            raise ConfigError("0 is no real time: set the commands in a second", path=("hz",))
        return cls(
            robot,
            InThread(act, executor),
            config,
            limits_for(config, robot.action_space),
            every=config.steps_between(chunk),
            on_step=on_step,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close = getattr(self._answers, "close", None)
        if close is not None:
            close()

    def stop(self, reason: str = "emergency stop") -> None:
        """Stop the robot; may be called in any thread, and by a signal handler."""
        self.controller.stop(reason)

    def run(self, steps: float = math.inf, *, seed: int | None = None) -> ControlCounts:
        """Reset the robot and play one episode, of so many steps at most; return its counts.

        Raises: what the robot or the policy raises.
        """
        observation, info = self.robot.reset(seed=seed)
        self.episode(observation, steps, at=info.get("command"))
        return self.controller.take_counts()

    def episode(self, observation: Any, steps: float = math.inf, *, at: Any = None) -> None:
        """Play an episode that begins with this observation. Its first chunk is waited for, however
        long that takes: then step 0 is due. If the policy raises, or the user interrupts, a robot
        with a command of rest gets that before the error is raised."""
        self.controller.begin(at)
        try:
            with prioritised(self._config.priority):
                self._episode(observation, steps)
        except BaseException:
            if self._rest is not None:
                with contextlib.suppress(Exception):
                    self.robot.step(self._as_action(self._rest))
            raise

    def _episode(self, observation: Any, steps: float) -> None:
        controller, clock, period = self.controller, self._clock, self._config.period
        self._seen_at = clock.now()
        self._ask(0, observation)
        if not controller.stopped:
            self._take(0, math.inf)
        start, step = clock.now(), 0
        while step < steps:
            clock.sleep_until(start + step * period)
            begun = clock.now()
            gone = min(int((begun - start) / period + 1e-9) - step, steps - 1 - step)
            if gone > 0:
                controller.skip(int(gone))
                step += int(gone)
            due = start + step * period
            controller.counts.add_jitter(begun - due)
            if self._look is not None:
                observation, self._seen_at = self._look(), clock.now()
            self._get_ready(step, observation, due + self._config.patience)
            sent = clock.now()
            command = controller.command(step, late=sent - due > self._config.patience + 1e-9)
            step += 1
            if command.action is None:
                if controller.stopped:
                    return
                continue
            observation, *rest = self.robot.step(self._as_action(command.action))
            self._seen_at = clock.now()
            if self._over(Stepped(command, due, sent, observation, *rest)):
                return

    def _as_action(self, command: Row) -> Any:
        """The command in shape and dtype of the robot's actions."""
        space = self.robot.action_space
        return command.astype(space.dtype).reshape(space.shape)

    def _over(self, stepped: Stepped) -> bool:
        """Whether the episode has ended with this step."""
        if stepped.info.get(EMERGENCY):
            self.controller.stop(str(stepped.info.get("reason", "the robot says so")))
        told = self._on_step(stepped) if self._on_step is not None else False
        over = stepped.terminated or stepped.truncated or told is True
        return over or stepped.command.source == "stopped"

    def _ask(self, step: int, observation: Any) -> None:
        self._open = Shown(step, self._seen_at, observation)
        self._asked = step
        self._answers.ask(self._open)

    def _take(self, step: int, until: float) -> bool:
        """Take the answer to the open question, if it comes by then."""
        if self._open is None:
            return False
        chunk = self._answers.wait(until)
        if chunk is None:
            return False
        self.controller.counts.add_answer(self._clock.now() - self._open.time)
        self.controller.arrived(self._open.step, chunk, step)
        self._open = None
        return True

    def _get_ready(self, step: int, observation: Any, deadline: float) -> None:
        """Ask what is to be asked at this step, and wait for its action where there is none."""
        self._take(step, -math.inf)
        while True:
            if self._open is None and step >= self._asked + self._every:
                self._ask(step, observation)
            if self.controller.ready(step) or self.controller.stopped or self._open is None:
                return
            if self._clock.now() >= deadline:
                return
            if not self._take(step, deadline):
                return


def limits_for(config: ControlConfig, space: Any) -> Limits:
    """The limits of commands for an action space, which has to be a Box of numbers.

    Raises:
        ConfigError: it is none, or settings do not fit it; the path is below that of ``config``.
    """
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:
        raise ConfigError(
            f"{config.hz:g}, but the action space is {space}: real time is for a Box of numbers",
            path=("hz",),
        )
    try:
        return Limits(config.safety, config.period, int(np.prod(space.shape)), low, high)
    except ConfigError as error:
        raise ConfigError(error.problem, path=("safety", *error.path)) from None
