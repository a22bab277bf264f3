"""An environment, tried before a run begins: what it returns is looked at, its steps timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rlinf_async.messages.converting import ObservationWriter, array_of
from rlinf_async.messages.spaces import ObservationArray, ObservationSpec
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.make import describe_env, opened
from rlinf_async.workers.env.make_batched import autoreset_of
from rlinf_async.workers.env.many import BatchedEnv, batch_of
from rlinf_async.workers.env.stage import ForeignEnv, Slot
from rlinf_async.workers.foreign_calls import RESET, STEP_AND_RESET, Call


class Stepped(msgspec.Struct, frozen=True):
    """Steps of the environments of a stage, as measured."""

    seconds: float
    """seconds of a step of all environments"""
    shown: bytes
    """observations after the steps, a row for each environment, as bytes"""

    def rows(self, spec: ObservationSpec) -> ObservationArray:
        """Return the observations ``[E, D]``."""
        found: ObservationArray = np.frombuffer(self.shown, spec.empty(1).dtype).copy()
        return found.reshape(-1, spec.state_size) if spec.flat else found


def try_env(config: EnvConfig, measure: float) -> Stepped | None:
    """Look at what a reset and a step return; then step for ``measure`` seconds, if that is above
    0. None where they are not measured, also because they raise: that is for a worker to report.

    Raises: as `describe_env`.
    """
    describe_env(config, probe=True)
    if not measure:
        return None
    try:
        return _stepped(config, measure)
    except Exception:
        return None


def seconds_of(call: Callable[[], object], enough: float) -> float:
    """Mean seconds of a call, over ``enough`` seconds; the first one is left out: it allocates and
    loads."""
    call()
    started = time.perf_counter()
    calls = 0
    while (passed := time.perf_counter() - started) < enough:
        call()
        calls += 1
    return passed / calls


def _stepped(config: EnvConfig, measure: float) -> Stepped:
    count = config.envs_per_stage
    with opened(config) as (env, spaces, noted):
        writer = ObservationWriter(getattr(env, spaces[0]), config.name)
        rows = writer.spec.empty(count)
        if config.many_in_a_call:
            by_hand = autoreset_of(config, env) == "disabled"
            seconds = _many(env, writer, rows, noted, measure, by_hand=by_hand)
        else:
            seconds = count * _one(env, writer, config, rows, noted.call, measure)
    return Stepped(seconds, rows.tobytes())


def _one(
    env: Any,
    writer: ObservationWriter,
    config: EnvConfig,
    rows: ObservationArray,
    call: Call,
    measure: float,
) -> float:
    """Seconds of a step of one environment; its resets are left to it."""
    slot = Slot(
        env, writer.write, label=config.name, seed=0, call=call, options=config.options or None
    )
    space = env.action_space
    space.seed(0)
    slot.reset(rows[0], 0)
    rows[:] = rows[0]

    def step() -> None:
        *_, ended = slot.step(space.sample(), rows[0])
        if ended is not None:
            slot.reset(rows[0])

    return seconds_of(step, measure)


def _many(
    env: BatchedEnv,
    writer: ObservationWriter,
    rows: ObservationArray,
    noted: ForeignEnv,
    measure: float,
    *,
    by_hand: bool,
) -> float:
    """Seconds of a step of a simulator, whose episodes it begins itself, or we ``by_hand``."""
    with noted.during(RESET):
        shown, _ = env.reset(seed=0)
    writer.write_all(shown, rows)
    space = env.single_action_space
    space.seed(0)
    actions = batch_of([space.sample() for _ in range(env.num_envs)])

    def step() -> None:
        with noted.during(STEP_AND_RESET):
            _, _, terminated, truncated, _ = env.step(actions)
            if by_hand and (ended := array_of(terminated) | array_of(truncated)).any():
                env.reset(options={"reset_mask": ended})

    return seconds_of(step, measure)
