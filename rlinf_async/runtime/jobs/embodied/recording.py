"""Demonstrations, recorded from a scripted policy in the environment of a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError, UsageError
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.config.errors import raised
from rlinf_async.config.registry import check_arguments
from rlinf_async.data.demonstrations import (
    DemonstrationsInfo,
    Episode,
    outside,
    write_episode,
    write_info,
)
from rlinf_async.messages.success import success_of
from rlinf_async.runtime.apart import apart
from rlinf_async.runtime.jobs.embodied.config import DemonstrationsConfig, EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings, ended_in, in_own_process
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed
from rlinf_async.workers.env.actions import ActionReader, answer_for, ends_of
from rlinf_async.workers.env.errors import is_interrupt
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
    check_arguments(function, name, "scripted policy", ("environment", "seed"), path)
    return function


def check_scripted_policy(config: EmbodiedConfig) -> None:
    """Load the scripted policy of a configuration where its environment is made, too: its file is
    often that of the environment.

    Raises:
        ConfigError: as `load_scripted_policy`; or its import ends the process.
    """
    name, path = config.demonstrations.policy, ("demonstrations", "policy")
    if not config.cluster.processes:
        load_scripted_policy(name, path)
        return
    try:
        in_own_process(_load, config.env, name, path, returns=None)
    except EnvError as error:
        raise ConfigError(f"{name!r}: {error}", path=path) from error


def _load(env: EnvConfig, name: str, path: tuple[str, ...]) -> None:
    load_scripted_policy(name, path)


def record_apart(
    config: EnvironmentSettings,
    wanted: DemonstrationsConfig,
    out: Path,
    *,
    keep_failures: bool = False,
) -> DemonstrationsInfo:
    """`record_demonstrations` in a process of its own, unless the run is to be in one process.

    Raises: as that, and `EnvFailed` where the process of the environment has ended, or hung.
    """
    if not config.cluster.processes:
        return record_demonstrations(config, wanted, out, keep_failures)
    try:
        return apart(
            record_demonstrations,
            *(config, wanted, out, keep_failures),
            returns=DemonstrationsInfo,
            name="Env",
            raises=(EnvError,),
        )
    except WorkerDied as death:
        raise EnvFailed(ended_in(config.env, death)) from death


def record_demonstrations(
    config: EnvironmentSettings,
    wanted: DemonstrationsConfig,
    out: Path,
    keep_failures: bool = False,
) -> DemonstrationsInfo:
    """Record episodes of a scripted policy into the folder ``out``.

    Args:
        config: whose environment is played; chunks and rescaling do not matter.
        wanted: the policy, called with the environment and a seed, which returns a function from
            an observation to an action; how many episodes; the seed of the first.
        out: a folder without files.
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
    make_policy = load_scripted_policy(wanted.policy)
    single = msgspec.structs.replace(config.env, action_chunk=1, group_size=1)
    env = NamedEnv(single)
    try:
        writer = ObservationWriter(env.env.observation_space, single.name)
        reader = ActionReader(env.env.action_space, single.name, single.actions)
        act = _called(f"{wanted.policy!r}", lambda: make_policy(env.env, wanted.seed))
        rescaled = single.actions == "rescale"
        script = _Script(wanted.policy, act, env.env.action_space, reader, rescaled=rescaled)
        out.mkdir(parents=True, exist_ok=True)
        played = (
            _play(env, writer, script, wanted.seed + attempt)
            for attempt in range(max(10 * wanted.episodes, SILENT))
        )
        successes = _keep(played, wanted, out, keep_failures=keep_failures)
    finally:
        env.close()
    info = DemonstrationsInfo(
        env=single.name,
        observation=writer.spec,
        action_size=reader.spec.columns,
        discrete=reader.spec.discrete,
        episodes=wanted.episodes,
        successes=successes,
        bounds=reader.bounds,
    )
    write_info(out, info)
    return info


def _keep(
    played: Iterable[tuple[Episode, bool | None]],
    wanted: DemonstrationsConfig,
    out: Path,
    *,
    keep_failures: bool,
) -> int | None:
    """Write as many of these episodes as are wanted; return how many of them succeeded, None where
    the environment says nothing of any.

    Raises:
        UsageError: there are too few.
    """
    kept, succeeded, known, attempts = 0, 0, False, 0
    for attempts, (episode, success) in enumerate(played, 1):
        if success is not None and not known:
            known = True
            if not keep_failures:
                kept = 0  # those before, of which nothing was said, are failures too
        if known and not success and not keep_failures:
            continue
        if kept < wanted.episodes:
            write_episode(out, kept, episode)
            kept, succeeded = kept + 1, succeeded + bool(success)
        if kept == wanted.episodes and (known or keep_failures or attempts >= SILENT):
            return succeeded if known else None
    raise UsageError(
        f"only {kept} of {attempts} episodes of {wanted.policy!r} succeeded: look at the policy, "
        "or keep failures too with --keep-failures"
    )


class _Script:
    """The scripted policy, whose actions reach the environment as those of a policy do.

    What the environment executes is what a policy would have to answer, and that is recorded:
    actions outside of the bounds are clipped to them.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[Any], Any],
        space: Any,
        reader: ActionReader,
        *,
        rescaled: bool,
    ) -> None:
        """Raises `ConfigError` where such actions cannot be demonstrated, `UsageError` where
        ``act`` is no function."""
        from gymnasium import spaces

        if not isinstance(space, (spaces.Box, spaces.Discrete)):
            raise ConfigError(
                f"actions of {space} cannot be demonstrated; those of one Box or of "
                "one Discrete can"
            )
        if not callable(act):
            raise UsageError(
                f"{name!r} returned a {type(act).__name__}; a scripted policy returns a function "
                "from an observation to an action"
            )
        self._name, self._act, self._reader = name, act, reader
        self._space: Any = space
        self._rescaled = rescaled
        self._clipped = False

    def act(self, observation: Any, seed: int, step: int) -> tuple[Any, Any]:
        """Return an action for the environment, and the answer of a policy that does the same.

        Raises:
            UsageError: the script raised, or returned what is no action.
        """
        where = f"{self._name!r}, in the episode with seed {seed}, at step {step}"
        value = _called(f"{where},", lambda: np.asarray(self._act(observation)))
        discrete = self._reader.spec.discrete
        problem = (_no_choice if discrete else _no_numbers)(value, self._space)
        if problem:
            raise UsageError(f"{where}, returned {problem}: {value.tolist()}")
        if not discrete:
            self._warn(value, where)
        answer = answer_for(self._space, value, self._reader.bounds, rescaled=self._rescaled)
        return self._reader.read(answer, 1)[0], answer[0]

    def _warn(self, value: NDArray[Any], where: str) -> None:
        """Say once that an action is clipped."""
        if self._clipped or not outside(value.reshape(-1), ends_of(self._space)).any():
            return
        self._clipped = True
        print(
            f"{where}: the action {value.tolist()} lies outside of {self._space}; such are clipped "
            "to its bounds, for the environment and in the demonstrations",
            file=sys.stderr,
        )


def _called(where: str, function: Callable[[], Any]) -> Any:
    """What a user's function returns; what it raises, but for a Ctrl-C, is a `UsageError`."""
    try:
        return function()
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise UsageError(f"{where} raised {raised(error)}") from error


def _no_choice(value: NDArray[Any], space: Any) -> str:
    """Why this is no action of a Discrete space; empty if it is one."""
    if value.size != 1 or value.dtype.kind not in "iu" or not space.contains(value.item()):
        return f"no choice of {space}"
    return ""


def _no_numbers(value: NDArray[Any], space: Any) -> str:
    """Why this is no action of a Box, bounds apart; empty if it is one."""
    if value.shape != space.shape or value.dtype.kind not in "biuf":
        return f"{value.dtype} of shape {list(value.shape)}, which is no action of {space}"
    return "" if np.isfinite(value).all() else "an action with NaN or infinity"


def _play(
    env: NamedEnv, writer: ObservationWriter, script: _Script, seed: int
) -> tuple[Episode, bool | None]:
    """One episode, and whether it succeeded, where the environment says so."""
    observation, info = env.reset(seed=seed)
    seen: list[Any] = []
    actions: list[Any] = []
    for step in range(MOST_STEPS):
        row = writer.spec.empty(1)
        writer.write(observation, row[0])
        action, answer = script.act(observation, seed, step)
        seen.append(row)
        actions.append(answer)
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    return Episode(np.concatenate(seen), np.array(actions)), success_of(info)
