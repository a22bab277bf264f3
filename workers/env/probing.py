"""A reset and a step of an environment, before anything starts: what does not fit is named.

What an environment raises itself is for its worker to report, with step and seed.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rlinf_async.messages.converting import ObservationWriter
from rlinf_async.messages.described import EnvError
from rlinf_async.messages.spaces import ObservationArray, numbers_of
from rlinf_async.workers.env.many import BatchedEnv, batch_of, last_name, one_each
from rlinf_async.workers.env.stage import ForeignEnv, reward_problem
from rlinf_async.workers.foreign_calls import RESET, STEP, STEP_AND_RESET

if TYPE_CHECKING:
    import gymnasium

    Env = gymnasium.Env[Any, Any]

PATIENCE: Final = 0.5
"""seconds for which a simulator is stepped until an episode is cut"""
LEAST_STEPS: Final = 4
"""steps that are measured in any case, however slow they are"""
RETURNED = "observation, reward, terminated, truncated, info"


def probe_one(env: Env, writer: ObservationWriter, name: str, noted: ForeignEnv) -> None:
    """Reset an environment and take a step with an action of its space.

    Raises:
        EnvError: what it returns is not what its spaces and Gymnasium's interface say.
        EnvFailed: it raised.
    """
    env.action_space.seed(0)
    rows = writer.spec.empty(1)
    with noted.during(RESET):
        returned: Any = env.reset(seed=0)
    with _returned_by(f"env {name}: reset()"):
        shown, _ = _parts(returned, "observation, info")
        _write(shown, rows, lambda: writer.write(shown, rows[0]))
    noted.steps += 1
    with noted.during(STEP):
        returned = env.step(env.action_space.sample())
    with _returned_by(f"env {name}: step()"):
        shown, reward, terminated, truncated, _ = _parts(returned, RETURNED)
        _write(shown, rows, lambda: writer.write(shown, rows[0]))
        _check_reward(reward)
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if np.shape(value):
                raise ValueError(f"{flag} of shape {np.shape(value)}, which is no bool")


def probe_many(
    env: BatchedEnv,
    writer: ObservationWriter,
    name: str,
    noted: ForeignEnv,
    *,
    shows_last: bool,
) -> None:
    """Reset a simulator of many environments, and take a step in all of them.

    Args:
        env: the simulator.
        writer: writer of the environment's observations.
        name: name of the environment, for errors.
        noted: what notes its calls.
        shows_last: whether the last observation of an episode that is cut has to stand in info:
            then it steps on until one is, for about `PATIENCE` seconds.

    Raises: as `probe_one`.
    """
    rows = writer.spec.empty(env.num_envs)
    with noted.during(RESET):
        returned: Any = env.reset(seed=0)
    with _returned_by(f"env {name}: reset()"):
        shown, _ = _parts(returned, "observations, info")
        _write(shown, rows, lambda: writer.write_all(shown, rows))
    space = env.single_action_space
    space.seed(0)
    began = time.monotonic()
    for taken in itertools.count(1):
        noted.steps = taken
        cut = _step_many(env, writer, rows, name, noted, shows_last=shows_last)
        enough = taken >= LEAST_STEPS and time.monotonic() - began > PATIENCE
        if cut or enough or not shows_last:
            return


def _step_many(
    env: BatchedEnv,
    writer: ObservationWriter,
    rows: ObservationArray,
    name: str,
    noted: ForeignEnv,
    *,
    shows_last: bool,
) -> bool:
    """Take a step; return whether an episode was cut."""
    space = env.single_action_space
    actions = batch_of([space.sample() for _ in range(env.num_envs)])
    with noted.during(STEP_AND_RESET):
        returned: Any = env.step(actions)
    with _returned_by(f"env {name}: step()"):
        shown, *each, info = _parts(
            returned, "observations, rewards, terminations, truncations, info"
        )
        _write(shown, rows, lambda: writer.write_all(shown, rows))
        _, terminated, truncated = (
            one_each(values, flag, env.num_envs)
            for flag, values in zip(("rewards", "terminations", "truncations"), each, strict=True)
        )
        cut = truncated.astype(np.bool_) & ~terminated.astype(np.bool_)
        if shows_last and cut.any():
            last_name(info)
    return bool(cut.any())


@contextmanager
def _returned_by(call: str) -> Iterator[None]:
    """Name the call whose result does not fit."""
    try:
        yield
    except ValueError as error:
        raise EnvError(f"{call} returned {error}") from error


def check_seed(env: Env, name: str) -> None:
    """Raise `EnvError` where the environment's reset takes no seed."""
    try:
        inspect.signature(env.unwrapped.reset).bind(seed=0)
    except TypeError as error:
        raise EnvError(
            f"env {name}: reset() takes no seed; Gymnasium's is reset(*, seed=None, options=None)"
        ) from error
    except ValueError:  # it has no signature that can be read
        return


def _parts(returned: Any, wanted: str) -> tuple[Any, ...]:
    count = len(wanted.split(", "))
    if not isinstance(returned, tuple) or len(returned) != count:
        found = f"{len(returned)} values" if isinstance(returned, tuple) else _called(returned)
        old = " (since Gym 0.26 the end of an episode is two values)" if count == 5 else ""
        raise ValueError(f"{found}; it has to return {wanted}{old}")
    if not isinstance(returned[-1], Mapping):
        raise ValueError(f"{_called(returned[-1])} as info, which has to be a dict")
    return returned


def _write(shown: Any, rows: ObservationArray, write: Callable[[], object]) -> None:
    try:
        write()
    except ValueError:
        raise
    except KeyError as error:
        raise ValueError(f"an observation without {error}, which its space has") from error
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{_called(shown)} as observation, which its space is not") from error
    numbers = numbers_of(rows)
    bad = 0 if numbers is None else int((~np.isfinite(numbers)).sum())
    if bad:
        raise ValueError(f"an observation with {bad} values that are NaN or infinite as float32")


def _check_reward(reward: Any) -> None:
    try:
        gained = float(reward)
    except (TypeError, ValueError) as error:
        shape = f" of shape {np.shape(reward)}" if np.shape(reward) else ""
        raise ValueError(f"{_called(reward)}{shape} as reward, which is no number") from error
    if problem := reward_problem(gained):
        raise ValueError(problem)


def _called(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
