"""Environments that get ready in virtual time: no test waits, and every order can be had."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlinf_async.messages.converting import ActionReader
from rlinf_async.messages.embodied import Choice, Ints, Level
from rlinf_async.messages.spaces import ObservationSpec
from rlinf_async.workers.env.many import Ready
from rlinf_async.workers.env.stage import Slot


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Virtual:
    """`AsyncEnvs` over slots of this process, whose steps take virtual time.

    Args:
        seconds: says how long the next step of an environment takes.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        spec: ObservationSpec,
        actions: ActionReader,
        clock: Clock,
        seconds: Callable[[int], float],
    ) -> None:
        self._slots, self._spec, self._actions = slots, spec, actions
        self._clock, self._seconds = clock, seconds
        self.under_way: list[Ready] = []
        self.batches: list[list[int]] = []
        """the environments of each `send`"""
        self.paused: list[tuple[list[int], int]] = []
        """the environments of each `pause`, and how many `send` there were before it"""

    def begin(self, seeds: Sequence[int] | None) -> None:
        for env in range(len(self._slots)):
            shown = self._reset(env, None if seeds is None else seeds[env])
            self._begun(Ready(env=env, ready_at=0.0, observation=shown))

    def send(self, answer: Choice, rows: Ints) -> None:
        assert not {one.env for one in self.under_way} & set(rows.tolist())
        self.batches.append(rows.tolist())
        for env, action in zip(rows.tolist(), self._actions.read(answer, len(rows)), strict=True):
            self._begun(self._step(env, action))

    def receive(self, timeout: float | None) -> list[Ready]:
        until = math.inf if timeout is None else self._clock.now + timeout
        first = min((one.ready_at for one in self.under_way), default=math.inf)
        assert first < math.inf or until < math.inf, "a wait that nothing ends"
        self._clock.now = max(self._clock.now, min(first, until))
        came = [one for one in self.under_way if one.ready_at <= self._clock.now]
        self.under_way = [one for one in self.under_way if one.ready_at > self._clock.now]
        return came

    def pause(self, rows: Ints) -> None:
        assert not {one.env for one in self.under_way} & set(rows.tolist())
        self.paused.append((rows.tolist(), len(self.batches)))

    def take_level(self, level: Level) -> None:
        for slot in self._slots:
            slot.level = level

    def judge(self, env: int, *, success: bool) -> None:
        self._slots[env].verdict = success

    def close(self) -> None:
        for slot in self._slots:
            slot.close()

    def _begun(self, ready: Ready) -> None:
        ready.ready_at = self._clock.now + self._seconds(ready.env)
        self.under_way.append(ready)

    def _step(self, env: int, action: Any) -> Ready:
        rows = self._spec.empty(1)
        reward, terminated, truncated, episode = self._slots[env].step(action, rows[0])
        cut, last = truncated and not terminated, rows[0]
        return Ready(
            env=env,
            ready_at=0.0,
            observation=last if episode is None else self._reset(env, None),
            reward=reward,
            terminated=terminated,
            truncated=cut,
            final_observation=None if episode is None else last,
            episode=episode,
            action_rewards=tuple(self._slots[env].action_rewards),
        )

    def _reset(self, env: int, seed: int | None) -> Any:
        rows = self._spec.empty(1)
        self._slots[env].reset(rows[0], seed)
        return rows[0]


def durations(seed: int) -> Callable[[int], float]:
    """Steps of random length: of one environment mostly short, of another mostly long."""
    random = np.random.default_rng(seed)
    typical = random.lognormal(-6.0, 2.0, 64)

    def seconds(env: int) -> float:
        return float(typical[env] * random.exponential())

    return seconds
