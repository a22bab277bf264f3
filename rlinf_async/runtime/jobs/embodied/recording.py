"""Demonstrations, recorded from a scripted policy in the environment of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.data.demonstrations import (
    DemonstrationsInfo,
    Episode,
    write_episode,
    write_info,
)
from rlinf_async.messages.success import success_of
from rlinf_async.runtime.apart import apart
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.settings import ended_in
from rlinf_async.workers.env import EnvError, EnvFailed
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.named import NamedEnv
from rlinf_async.workers.env.observations import ObservationWriter
from rlinf_async.workers.errors import WorkerDied

MOST_STEPS = 100_000
"""of an episode, for an environment that does not end"""

SILENT: Final = 20
"""episodes after which an environment that has not said of any whether it succeeded never will"""


def load_scripted_policy(
    name: str, path: tuple[str, ...] = ()
) -> Callable[[Any, int], Callable[[Any], Any]]:
    """The function of this name, which makes a scripted policy of an environment and a seed.

    ``path`` leads to the setting in the configuration. Raises `ConfigError` where there is no such
    function, or it takes other arguments.
    """
    function = load_entry_point(name, path)
    try:
        inspect.signature(function).bind(None, 0)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} takes other arguments ({error}): a scripted policy is a function of the "
            "environment and a seed, which returns a function from an observation to an action",
            path=path,
        ) from error
    except ValueError:  # of something whose signature cannot be read
        pass
    return function


def record_apart(
    config: EmbodiedConfig,
    policy: str,
    out: Path,
    *,
    episodes: int,
    seed: int,
    keep_failures: bool = False,
) -> DemonstrationsInfo:
    """`record_demonstrations` in a process of its own, unless the run is to be in one process.

    Raises: as that, and `EnvFailed` where the process of the environment has ended, or hung.
    """
    record = partial(
        record_demonstrations, episodes=episodes, seed=seed, keep_failures=keep_failures
    )
    if not config.cluster.processes:
        return record(config, policy, out)
    try:
        return apart(
            record, config, policy, out, returns=DemonstrationsInfo, name="Env", raises=(EnvError,)
        )
    except WorkerDied as death:
        raise EnvFailed(ended_in(config.env, death)) from death


def record_demonstrations(
    config: EmbodiedConfig,
    policy: str,
    out: Path,
    *,
    episodes: int,
    seed: int,
    keep_failures: bool = False,
    on_episode: Callable[[int], None] | None = None,
) -> DemonstrationsInfo:
    """Record ``episodes`` episodes of the scripted policy into the folder ``out``.

    Args:
        config: whose environment is played; chunks and rescaling do not matter.
        policy: ``"module:function"`` or ``"file.py:function"``, called with the environment and
            a seed; returns a function from an observation to an action.
        seed: of the first episode; each has its own.
        keep_failures: keep failures too: episodes of which the environment reports no success,
            where it reports that of others.

    Raises:
        UsageError: ``out`` holds files already, or the policy cannot be loaded, or too few of its
            episodes succeed.
        EnvError: the environment's spaces are not supported.
        EnvFailed: the environment raised.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out}: is not empty; name a new folder")
    make_policy = load_scripted_policy(policy)
    single = msgspec.structs.replace(config.env, action_chunk=1, group_size=1)
    env = NamedEnv(single)
    try:
        writer = ObservationWriter(env.env.observation_space, single.name)
        spec = ActionReader(env.env.action_space, single.name, single.actions).spec
        if not (spec.continuous or spec.discrete):
            raise ConfigError(
                f"actions of {env.env.action_space} cannot be demonstrated; those of one Box or of "
                "one Discrete can"
            )
        act = make_policy(env.env, seed)
        if not callable(act):
            raise UsageError(
                f"{policy!r} returned a {type(act).__name__}; a scripted policy returns a function "
                "from an observation to an action"
            )
        to_policy = _inverse(env.env.action_space, single.actions)
        out.mkdir(parents=True, exist_ok=True)
        kept, succeeded, known = 0, 0, False
        attempts = max(10 * episodes, SILENT)
        for attempt in range(attempts):
            episode, success = _play(env, writer, act, to_policy, seed + attempt)
            if success is not None and not known:
                known = True
                if not keep_failures:
                    kept = 0  # those before, of which nothing was said, are failures too
            if known and not success and not keep_failures:
                continue
            if kept < episodes:
                write_episode(out, kept, episode)
                kept, succeeded = kept + 1, succeeded + bool(success)
                if on_episode is not None:
                    on_episode(kept)
            if kept == episodes and (known or keep_failures or attempt + 1 >= SILENT):
                break
    finally:
        env.close()
    if kept < episodes:
        raise UsageError(
            f"only {kept} of {attempts} episodes of {policy!r} succeeded: look at the policy, "
            "or keep failures too with --keep-failures"
        )
    info = DemonstrationsInfo(
        env=single.name,
        observation=writer.spec,
        action_size=1 if spec.discrete else spec.columns,
        discrete=spec.discrete,
        episodes=kept,
        successes=succeeded if known else None,
    )
    write_info(out, info)
    return info


def _inverse(space: Any, actions: str) -> Callable[[Any], Any]:
    """Return the function from the environment's actions to those of a policy."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return lambda action: np.int64(action) - first
    low, high = np.ravel(space.low), np.ravel(space.high)

    def rescaled(action: Any) -> Any:
        share = (np.ravel(action) - low) / (high - low)
        return (2.0 * share - 1.0).astype(np.float32)

    return rescaled if actions == "rescale" else lambda action: np.ravel(action).astype(np.float32)


def _play(
    env: NamedEnv,
    writer: ObservationWriter,
    act: Callable[[Any], Any],
    to_policy: Callable[[Any], Any],
    seed: int,
) -> tuple[Episode, bool | None]:
    """One episode, and whether it succeeded, where the environment says so."""
    observation, info = env.reset(seed=seed)
    seen: list[Any] = []
    actions: list[Any] = []
    for _ in range(MOST_STEPS):
        row = writer.spec.empty(1)
        writer.write(observation, row[0])
        action = act(observation)
        seen.append(row)
        actions.append(to_policy(action))
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    return Episode(np.concatenate(seen), np.array(actions)), success_of(info)
