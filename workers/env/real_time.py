"""An environment in real time, to everything outside one that takes a chunk of actions in a step.

::

    worker   reset ------------------ step(chunk 0) --------- step(chunk 1) --- ...
               |  what it shows        |     what it shows      |
               v  first     policy     v     after `every`      v
    thread   [ ... ] .................[ 0  0  0  0  0  0  0  0  1  1 ... ]    one command each 1/hz

The loop (`rlinf_async.realtime`) runs in a thread of its own, in which the environment is made,
reset, stepped and closed. What the environment shows when a question is due is what ``step``
returns, with the rewards since the last question; the answer is the next ``step``. Between the two
the loop goes on with the last chunk: policy and robot overlap.

`pause` stops the time of the loop until the next answer: between two tickets nobody is asked, and
nothing is missed. The robot holds what it was last told.

Invariant: each step of the environment is in the reward of exactly one ``step``.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from rlinf_async.messages.embodied import ControlCounts
from rlinf_async.realtime import (
    ControlConfig,
    RealTimeLoop,
    Shown,
    Stepped,
    limits_for,
    prioritised,
)
from rlinf_async.workers.env.chunks import chunks_of
from rlinf_async.workers.env.stage import ACTION_REWARDS, CONTROL

T = TypeVar("T")


class EmergencyStop(RuntimeError):
    """The robot was stopped; nothing goes on until somebody has looked at it."""


class _Left(Exception):
    """The episode was left by the worker: there is no answer any more."""


class _Thread:
    """Calls functions one after the other, in one thread that ends with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name="real time", daemon=True).start()

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Begin a call once those before it are done."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        """End the thread once all calls are done."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
            del call, future, function


class _Outcome(NamedTuple):
    """What the loop says when it asks, or ends."""

    observation: Any
    rewards: list[float]
    """those of the steps since it asked last"""
    counts: ControlCounts
    over: bool = False
    """whether the episode is over"""
    ended: Stepped | None = None
    """its last step, if it had one"""
    stopped: str = ""
    """why an episode has ended that the environment did not end"""


class _Questions:
    """`Answers` of whoever calls ``step``, and the `Clock` of the loop: both stop in a pause."""

    def __init__(self, clock: Callable[[], float], gather: Callable[[Any], _Outcome]) -> None:
        self._clock, self._gather = clock, gather
        self._changed = threading.Condition()
        self._paused_at: float | None = None
        self._paused = 0.0
        self._chunk: Any = None
        self._left = self._over = False
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.asked: queue.SimpleQueue[_Outcome | BaseException] = queue.SimpleQueue()
        """what the loop has said, in its order; or the error that ended it"""

    # ---- the loop's thread

    def now(self) -> float:
        """Seconds, without those of pauses."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return now - self._paused

    def sleep_until(self, when: float) -> None:
        """Wait; in a pause until it is over."""
        with self._changed:
            self._wait(when, lambda: False)

    def ask(self, shown: Shown) -> None:
        """Let a ``step`` return."""
        self.asked.put(self._gather(shown.observation))

    def wait(self, until: float) -> Any:
        """Return the answer, or None at that time."""
        with self._changed:
            self._wait(until, lambda: self._chunk is not None)
            chunk, self._chunk = self._chunk, None
            return chunk

    def end(self) -> None:
        """Do what is still to be done in this thread: nothing is from now on."""
        with self._changed:
            self._over = True
            self._do_calls()

    def _wait(self, until: float, over: Callable[[], bool]) -> None:
        while True:
            self._do_calls()
            if self._left:
                raise _Left
            left = math.inf if self._paused_at is not None else until - self.now()
            if over() or left <= 0.0:
                return
            self._changed.wait(None if left == math.inf else left)

    def _do_calls(self) -> None:
        calls, self._calls = self._calls, []
        for future, function in calls:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    # ---- the worker's

    def call(self, function: Callable[[], T]) -> Future[T] | None:
        """Have a function called in the thread of the loop while that waits; None where the loop
        has ended."""
        future: Future[T] = Future()
        with self._changed:
            if self._over:
                return None
            self._calls.append((future, function))
            self._changed.notify_all()
        return future

    def answer(self, chunk: Any) -> None:
        """Give the answer to the last question, and end a pause."""
        with self._changed:
            self._chunk = chunk
            if self._paused_at is not None:
                self._paused += self._clock() - self._paused_at
                self._paused_at = None
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop the time."""
        with self._changed:
            if self._paused_at is None:
                self._paused_at = self._clock()
            self._changed.notify_all()

    def leave(self) -> None:
        """End the loop where it waits next."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


def _try(priority: int) -> None:
    with prioritised(priority):
        pass


class _Robot:
    """The environment, as the loop commands it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.action_space, self.step = env.action_space, env.step
        look = _observe_of(env)
        if look is not None:
            self.observe = look


def _observe_of(env: gymnasium.Env[Any, Any]) -> Callable[[], Any] | None:
    """The method ``observe`` of an environment, below wrappers that do not change what it shows."""
    while not hasattr(type(env), "observe"):
        if not isinstance(env, gymnasium.Wrapper) or isinstance(env, gymnasium.ObservationWrapper):
            return None
        env = env.env
    found: Callable[[], Any] = env.observe  # type: ignore[attr-defined]  # it was looked for
    return found


class RealTimeEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Executes chunks of ``size`` actions of a Box at ``config.hz``, while the next are computed.

    Args:
        make: makes the environment, whose ``step`` does not wait.
        config: the times, and the limits.
        size: actions of a chunk.
        clock: seconds.

    Raises:
        ConfigError: a setting does not fit the actions; the path is below that of ``config``.
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        config: ControlConfig,
        size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread, self._clock, self._config = _Thread(), clock, config
        self._questions: _Questions | None = None
        self._playing: Future[None] | None = None
        self._emergency, self._closed, self._over = "", False, False
        try:
            super().__init__(self._thread.begin(make).result())
        except BaseException:
            self._thread.end()
            raise
        try:
            self._limits = limits_for(config, self.env.action_space)
            self._thread.begin(lambda: _try(config.priority)).result()
            self._every = config.steps_between(size)
        except BaseException:
            self.close()
            raise
        if size > 1:
            self.action_space = chunks_of(self.env.action_space, size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._leave()
        self._raise_emergency()
        env = self.env
        shown, info = self._thread.begin(lambda: env.reset(seed=seed, options=options)).result()
        rewards, last = list[float](), list[Stepped]()

        def stepped(step: Stepped) -> None:
            rewards.append(float(step.reward))
            last[:] = [step]

        def gather(observation: Any) -> _Outcome:
            paid = rewards[:]
            rewards.clear()
            return _Outcome(observation, paid, loop.controller.take_counts())

        questions = _Questions(self._clock, gather)
        loop = RealTimeLoop(
            _Robot(env),
            questions,
            self._config,
            self._limits,
            every=self._every,
            clock=questions,
            on_step=stepped,
        )

        def play() -> None:
            try:
                loop.episode(shown, at=info.get("command"))
                self._emergency = loop.controller.emergency
                ended = last[0] if last else None
                over = gather(ended.observation if ended else shown)
                stopped = loop.controller.stopped
                questions.asked.put(over._replace(over=True, ended=ended, stopped=stopped))
            except _Left:
                pass
            except BaseException as error:
                questions.asked.put(error)
            finally:
                questions.end()

        self._questions, self._playing = questions, self._thread.begin(play)
        return self._told(questions).observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        questions = self._questions
        if questions is None or self._over:
            raise RuntimeError("no episode is played: call reset before step")
        questions.answer(np.asarray(action))
        told = self._told(questions)
        self._raise_emergency()
        ended = told.ended
        info = {} if ended is None else dict(ended.info)
        info[CONTROL] = told.counts
        if self._every > 1:
            # Where an answer was late, so was the next question: more steps are in between.
            kept, more = told.rewards[: self._every], told.rewards[self._every :]
            info[ACTION_REWARDS] = [*kept[:-1], kept[-1] + sum(more)] if more else kept
        terminated = ended is not None and bool(ended.terminated)
        # A missed deadline may have stopped it, too.
        truncated = bool(told.stopped) or (ended is not None and bool(ended.truncated))
        return told.observation, sum(told.rewards), terminated, truncated, info

    def pause(self) -> None:
        """Stop the time until the next `step`: nobody computes an answer."""
        if self._questions is not None:
            self._questions.pause()

    def render(self) -> Any:
        render = self.env.render
        drawn = self._questions.call(render) if self._questions is not None else None
        return (drawn or self._thread.begin(render)).result()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._leave()
        try:
            self._thread.begin(self.env.close).result()
        finally:
            self._thread.end()

    def _told(self, questions: _Questions) -> _Outcome:
        told = questions.asked.get()
        self._over = isinstance(told, BaseException) or told.over
        if isinstance(told, BaseException):
            raise told
        return told

    def _leave(self) -> None:
        """End the episode that is played, and wait for that."""
        if self._questions is not None and self._playing is not None:
            self._questions.leave()
            self._playing.result()
            self._playing = None

    def _raise_emergency(self) -> None:
        if self._emergency:
            raise EmergencyStop(
                f"the robot was stopped: {self._emergency}. Nothing goes on until somebody has "
                "looked at it and started again"
            )
