"""Environments of which some get ready before others, as a stage.

::

    step(answer, rows) --send--> [ in flight ] --receive--> those that are ready: the outcome
                                       |
                                       +--> the others go on, and are part of a later outcome

`Readiness` says how long those that are ready wait for others. A reset is part of the step that
ended the episode: its environment is not ready before, and nobody waits for it who need not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rlinf_async.messages.embodied import Choice, Floats, Ints
from rlinf_async.messages.spaces import ObservationSpec, Seen
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.readiness import Readiness
from rlinf_async.workers.env.slot import Episode
from rlinf_async.workers.env.stage import Outcome, chunk_rewards


class Ready(msgspec.Struct, kw_only=True):
    """An environment that has ended its step, or its reset."""

    env: int
    ready_at: float
    """seconds of `time.monotonic`"""
    observation: Any
    """``[D]``, or a structured scalar: what it shows now, after a reset where its episode ended"""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    """cut, and not terminated"""
    final_observation: Any = None
    """the last observation of the episode, where that was cut"""
    episode: Episode | None = None
    """the one that ended"""
    action_rewards: Sequence[float] = ()
    """of the actions of a chunk that were executed"""
    valid: bool = True
    """False: the step only began an episode"""


class AsyncEnvs(Protocol):
    """Environments that step by themselves, numbered from 0.

    Raises `EnvFailed` where one raised, or showed NaN or infinity.
    """

    def begin(self, seeds: Sequence[int] | None) -> None:
        """Begin an episode in every environment; with a seed for each, where they are given."""
        ...

    def send(self, answer: Choice, rows: Ints) -> None:
        """Begin a step in these environments, with actions ``[len(rows), A]``."""
        ...

    def receive(self, timeout: float | None) -> list[Ready]:
        """Wait for at least one environment, and return all that are ready; none after so many
        seconds. None: for as long as it takes."""
        ...

    def close(self) -> None:
        """Close the environments, those in the middle of a step too."""
        ...


class AsyncStage:
    """``E`` environments; an `EnvStage`."""

    def __init__(
        self,
        envs: AsyncEnvs,
        count: int,
        spec: ObservationSpec,
        actions: ActionReader,
        readiness: Readiness,
        *,
        action_chunk: int = 1,
        group_size: int = 1,
        seeds: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seeds`` are those of the first episodes; None: the simulator has its own."""
        self._envs, self._spec, self._actions = envs, spec, actions
        self._readiness, self._clock, self._seeds = readiness, clock, seeds
        self._action_chunk, self._group_size = action_chunk, group_size
        self.rows: Ints | None = np.arange(count)
        self.observation: Seen = spec.empty(count)
        """``[E, D]``: present observations; rows change in place as environments get ready"""
        self._fresh = True
        self._in_flight = 0
        self._shown_at = -math.inf
        """when the last outcome was returned"""

    @property
    def in_flight(self) -> int:
        """How many have a step under way."""
        return self._in_flight

    @property
    def needs_reset(self) -> bool:
        """Whether `reset` is due before the first step: never again after it."""
        return self._fresh

    def reset(self) -> None:
        """Begin the first episodes; wait for steps under way, of which nobody wants the outcome.

        Raises:
            EnvFailed: an environment raised, or showed NaN or infinity.
        """
        self._settle()
        if self._fresh:
            self._begin(self._seeds)

    def begin_groups(self, seeds: Sequence[int]) -> None:
        """Begin an episode in every environment, from one seed for each group.

        Raises: as `reset`.
        """
        self._settle()
        self._begin([seed for seed in seeds for _ in range(self._group_size)])

    def step(self, answer: Choice | None, rows: Ints | None = None) -> Outcome:
        """Begin a step in ``rows``, and return the steps that have ended: at least one.

        Raises:
            EnvFailed: an environment raised, or returned NaN or infinity.
            EnvError: the actions do not fit.
        """
        sent = np.arange(len(self.observation)) if rows is None else rows
        if sent.size:
            if math.isfinite(self._shown_at):
                self._readiness.answered(self._clock() - self._shown_at)
            self._envs.send(self._actions.checked(answer, len(sent)), sent)
            self._in_flight += len(sent)
        ready = sorted(self._gather(), key=lambda one: one.env)
        self._shown_at = self._clock()
        return self._outcome(ready)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _begin(self, seeds: Sequence[int] | None) -> None:
        self._envs.begin(seeds)
        self._in_flight = len(self.observation)
        self._settle()
        self._fresh = False

    def _settle(self) -> None:
        while self._in_flight:
            self._receive(None)

    def _gather(self) -> list[Ready]:
        """Those that are answered together."""
        ready: list[Ready] = []
        while self._in_flight:
            until = self._readiness.wait_until([one.ready_at for one in ready], self._in_flight)
            left = until - self._clock()
            # One that is ready is taken, also where nobody would wait for it.
            came = self._receive(None if left == math.inf else max(left, 0.0))
            ready += came
            if not came and left <= 0.0:
                break
        return ready

    def _receive(self, timeout: float | None) -> list[Ready]:
        came = self._envs.receive(timeout)
        self._in_flight -= len(came)
        for one in came:
            self.observation[one.env] = one.observation
        return came

    def _outcome(self, ready: Sequence[Ready]) -> Outcome:
        finals = [one.final_observation for one in ready if one.truncated]
        action_reward, executed = None, None
        if self._action_chunk > 1:
            rewards = [one.action_rewards for one in ready]
            action_reward, executed = chunk_rewards(rewards, self._action_chunk)
        return Outcome(
            _floats([one.reward for one in ready]),
            np.array([one.terminated for one in ready], np.bool_),
            np.array([one.truncated for one in ready], np.bool_),
            self._stacked(finals) if finals else None,
            [one.episode for one in ready if one.episode is not None],
            action_reward,
            executed,
            None
            if all(one.valid for one in ready)
            else np.array([one.valid for one in ready], np.bool_),
            np.array([one.env for one in ready], np.int64),
        )

    def _stacked(self, observations: Sequence[Any]) -> Seen:
        rows = self._spec.empty(len(observations))
        for place, one in enumerate(observations):
            rows[place] = one
        return rows


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)
