"""Demonstrations: episodes of somebody who can do the task, in a folder.

::

    demonstrations.json       what is shown and done: the parts of an observation, the action's size
    episode_000000.npz        an array for each part, ``[T, ...]``, and ``action [T, A]``;
                              what a transition has besides: ``next.reward [T]``, ``last.PART
                              [1, ...]`` (each part after the last step), and ``next.terminated``,
                              False where the episode was only cut; and ``success``, where the
                              environment says it
    episode_000001.npz        ...

What a transition has is in folders that say ``transitions``; cloning needs none of it. Images are
uint8 and texts UTF-8 bytes, as in `rlinf_async.messages.spaces`; actions are those of the policy:
with ``env.actions = "rescale"`` bounds are -1 and 1. Those outside of the bounds are refused.

A folder of LeRobot's format is read too: `rlinf_async.data.lerobot`. It has no observation after
the last step: where an episode did not end there for good, that step is no transition.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.data.config import DataError
from rlinf_async.data.lerobot import DONE, LeRobotFolder, is_lerobot
from rlinf_async.messages.spaces import STATE, ObservationArray, ObservationSpec

Bounds = Sequence[tuple[float, float]]

FILE: Final = "demonstrations.json"
ACTION: Final = "action"
REWARD: Final = "next.reward"  # in both formats
TERMINATED: Final = "next.terminated"
SUCCESS: Final = "success"
LAST: Final = "last."
"""names in an episode's file; `LAST` stands before the name of a part"""


class DemonstrationsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a folder of demonstrations."""

    env: str
    """name of the environment"""
    observation: ObservationSpec
    action_size: int
    """numbers of an action; choices are one number"""
    discrete: bool = False
    episodes: int
    successes: int | None = None
    """episodes that succeeded; None where the environment does not say"""
    bounds: tuple[tuple[float, float], ...] = ()
    """lowest and highest value of each number of an action, as in `EnvSpec.bounds`; none in folders
    of earlier versions, or from elsewhere"""
    transitions: bool = False
    """whether episodes have what a transition has; not in folders of earlier versions, or of
    LeRobot without rewards"""
    rewards: str | None = None
    """who said what steps pay, in the place of the environment; empty: it did; None: not known, as
    in folders of earlier versions, or from elsewhere"""


class Outcome(msgspec.Struct, frozen=True):
    """What followed the actions of an episode of ``T`` steps."""

    reward: NDArray[np.float32]
    """``[T]``"""
    last_observation: ObservationArray
    """``[1, D]``, or structured ``[1]``: after the last step"""
    terminated: bool
    """whether the episode ended for good; False: it was cut, and would have gone on"""


class DemonstratedEpisode(msgspec.Struct, frozen=True):
    """One demonstrated episode of ``T`` steps."""

    observation: ObservationArray
    """``[T, D]``, or structured ``[T]``"""
    action: NDArray[Any]
    """float32 ``[T, A]``, or int64 ``[T]``"""
    outcome: Outcome | None = None
    """None in folders without ``transitions``"""
    success: bool | None = None
    """whether it has succeeded; None where nobody says so, and in folders of earlier versions"""


class Chunks(msgspec.Struct, frozen=True):
    """Every step of every episode, with the actions that follow it."""

    observation: ObservationArray
    """``[N, ...]``"""
    action: NDArray[Any]
    """``[N, H, A]`` (int64 ``[N]`` of choices), 0 after the end of an episode"""
    there: NDArray[np.bool_]
    """``[N, H]``: False after the end of an episode"""


def write_episode(folder: Path, number: int, episode: DemonstratedEpisode) -> None:
    """Write one episode's file."""
    arrays: dict[str, Any] = {ACTION: episode.action, **_fields(episode.observation)}
    if (outcome := episode.outcome) is not None:
        last = _fields(outcome.last_observation)
        arrays |= {f"{LAST}{name}": array for name, array in last.items()}
        arrays |= {REWARD: outcome.reward, TERMINATED: np.bool_(outcome.terminated)}
    if episode.success is not None:
        arrays[SUCCESS] = np.bool_(episode.success)
    np.savez_compressed(_file(folder, number), **arrays)


def _fields(observation: ObservationArray) -> dict[str, Any]:
    """Parts of observations, by name."""
    names = observation.dtype.names
    if names is None:
        return {STATE: observation}
    return {name: observation[name] for name in names}


def write_info(folder: Path, info: DemonstrationsInfo) -> None:
    """Write what the folder holds, after the episodes."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2))


def read_info(folder: Path, wanted: ObservationSpec | None = None) -> DemonstrationsInfo:
    """Return what the folder holds; raises `DataError` for one that has no demonstrations.

    Of a folder of LeRobot only the ``wanted`` parts are looked at.
    """
    if is_lerobot(folder):
        found = LeRobotFolder(folder)
        return DemonstrationsInfo(
            env=found.robot,
            observation=found.spec(wanted or ObservationSpec()),
            action_size=found.action_size,
            discrete=found.discrete,
            episodes=found.episodes,
            transitions=found.rewarded,
        )
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=DemonstrationsInfo)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{str(folder)!r} holds no demonstrations: its {FILE} cannot be read: {error}; "
            "`rlinf-async demonstrations` records them"
        ) from error


def read_episodes(
    folder: Path, wanted: ObservationSpec | None = None, *, transitions: bool = False
) -> Iterator[DemonstratedEpisode]:
    """Read all episodes; of a folder of LeRobot with their outcome only where ``transitions`` are
    wanted, which its last steps may not be.

    Raises `DataError` for a file that is damaged or of another shape.
    """
    info = read_info(folder, wanted)
    if is_lerobot(folder):
        shown = msgspec.structs.replace(info, transitions=False)
        for path, found in LeRobotFolder(folder).arrays(info.observation, rewarded=transitions):
            with _explained(path):
                episode = episode_of(found, shown)
                if transitions:
                    episode = _with_outcome(episode, found[REWARD], found[DONE])
            if len(episode.action):
                yield episode
        return
    for number in range(info.episodes):
        path = _file(folder, number)
        with _explained(path), np.load(path, allow_pickle=False) as arrays:
            episode = episode_of(arrays, info)
        yield episode


def _with_outcome(
    episode: DemonstratedEpisode, reward: NDArray[np.float32], done: NDArray[np.bool_]
) -> DemonstratedEpisode:
    """The episode of a data set that has no observation after the last step.

    Where it ended for good, nothing depends on that observation; where it was cut, it is without
    its last step, of which only the observation is known.

    Raises: as `_check_left_out`.
    """
    _check_left_out(reward, done)
    seen, terminated = episode.observation, bool(done[-1])
    last = seen[-1:]
    if not terminated:
        seen, reward = seen[:-1], reward[:-1]
    outcome = Outcome(reward, last, terminated)
    return DemonstratedEpisode(seen, episode.action[: len(seen)], outcome)


def _check_left_out(reward: NDArray[np.float32], done: NDArray[np.bool_]) -> None:
    """Raise `ValueError` where a step that is left out has all of an episode's reward."""
    if not done[-1] and reward[-1] and not reward[:-1].any():
        raise ValueError(
            f"all of its reward ({reward[-1]:g}) is that of its last step, which is left out, "
            f"since {DONE} is false there and the observation after it is not known: set {DONE} "
            "where an episode ended for good"
        )


def count_steps(folder: Path) -> int:
    """Return the steps of all episodes, more than which are no transitions; reads no array.

    Raises `DataError` for a file that is damaged.
    """
    if is_lerobot(folder):
        return LeRobotFolder(folder).steps
    steps = 0
    for number in range(read_info(folder).episodes):
        path = _file(folder, number)
        with (
            _explained(path),
            zipfile.ZipFile(path) as arrays,
            arrays.open(f"{ACTION}.npy") as file,
        ):
            steps += _header(file)[0][0]
    return steps


def check_demonstrations(
    folder: Path,
    observation: ObservationSpec,
    action_size: int,
    *,
    discrete: bool,
    bounds: Bounds = (),
    transitions: bool = False,
) -> DemonstrationsInfo:
    """Return what the folder holds; raises `DataError` unless it fits these spaces.

    Reads all actions, rewards and the numbers of what is shown: they are finite, and actions lie
    within ``bounds``, the lowest and highest of each number, where they are given. With
    ``transitions`` a folder without rewards, terminations and last observations is refused.
    """
    info = read_info(folder, observation)
    if info.observation != observation:
        raise DataError(
            f"the demonstrations in {str(folder)!r} show {info.observation}, but the environment "
            f"shows {observation}: record them in this environment"
        )
    if (info.action_size, info.discrete) != (action_size, discrete):
        found = _actions(info.action_size, info.discrete)
        raise DataError(
            f"the demonstrations in {str(folder)!r} have {found}, but the environment takes "
            f"{_actions(action_size, discrete)}: record them in this environment"
        )
    if not info.episodes:
        raise DataError(f"{str(folder)!r} holds no episodes")
    if transitions and not info.transitions and is_lerobot(folder):
        raise DataError(
            f"the demonstrations in {str(folder)!r} have no rewards, which learning from "
            f"transitions needs: its features have no {REWARD!r}. Add that column, or clone them "
            "(job = 'embodied_ppo', actor.cloning)"
        )
    if transitions and not info.transitions:
        raise DataError(
            f"the demonstrations in {str(folder)!r} have no rewards, no terminations and no "
            "observations after the last step, which learning from transitions needs: record them "
            "again with `rlinf-async demonstrations`"
        )
    if bounds and info.bounds not in ((), tuple(bounds)):
        raise DataError(
            f"the demonstrations in {str(folder)!r} have actions within {_ranges(info.bounds)}, "
            f"but those of the policy lie within {_ranges(bounds)}: record them with the same "
            "env.actions, in this environment"
        )
    if is_lerobot(folder):
        numbers = ObservationSpec(tuple(p for p in info.observation.parts if p.kind == "state"))
        lerobot = LeRobotFolder(folder)
        lerobot.check_videos(info.observation)
        for path, arrays in lerobot.arrays(numbers, rewarded=transitions):
            with _explained(path):
                _check_action(arrays[ACTION], info, bounds)
                _check_numbers(arrays, STATE)
                if transitions:
                    ended, steps = np.asarray(arrays[DONE][-1]), len(arrays[ACTION])
                    _check_outcome(arrays[REWARD], ended, steps)
                    _check_left_out(arrays[REWARD], arrays[DONE])
        return info
    for number in range(info.episodes):
        _check_file(_file(folder, number), info, bounds)
    return info


def _check_action(action: NDArray[Any], info: DemonstrationsInfo, bounds: Bounds) -> None:
    """Raise `ValueError` unless these are an episode's actions."""
    if not len(action):
        raise ValueError("it has no steps")
    if info.discrete:
        if action.ndim != 1 or action.dtype.kind not in "iu":
            raise ValueError(f"its actions are {action.dtype} {list(action.shape)}, no choices")
    elif action.shape != (len(action), info.action_size) or action.dtype.kind not in "fiu":
        raise ValueError(
            f"its actions are {action.dtype} of shape {list(action.shape)}, not {info.action_size} "
            "numbers each"
        )
    rows = action.reshape(len(action), -1).astype(np.float64)
    if not np.isfinite(rows).all():
        step = np.flatnonzero(~np.isfinite(rows).all(-1))[0]
        raise ValueError(
            f"an action is NaN or infinite: that of step {step}, {rows[step].tolist()}"
        )
    if bounds and (beyond := outside(rows, bounds).any(-1)).any():
        step = np.flatnonzero(beyond)[0]
        raise ValueError(
            f"its action of step {step}, {rows[step].tolist()}, lies outside of the policy's range "
            f"{_ranges(bounds)}: with env.actions = 'rescale' the environment's bounds are -1 and "
            "1, with 'clip' they are its own"
        )


def outside(actions: NDArray[Any], bounds: Bounds) -> NDArray[np.bool_]:
    """Return which numbers of actions ``[..., A]`` are outside of the bounds.

    A bound such as 0.1 is no float32, which actions may be: its float32 is within.
    """
    least, most = np.array(bounds).T
    with np.errstate(over="ignore"):
        low, high = np.float32(least), np.float32(most)
    beyond: NDArray[np.bool_] = (actions < np.minimum(least, low)) | (
        actions > np.maximum(most, high)
    )
    return beyond


def _check_numbers(arrays: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` where a number that is shown under this name is NaN or infinite."""
    if name not in arrays:
        return
    with np.errstate(over="ignore"):
        shown = np.asarray(arrays[name], np.float32)
    finite = np.isfinite(shown.reshape(len(shown), -1)).all(-1)
    if not finite.all():
        step = np.flatnonzero(~finite)[0]
        raise ValueError(f"{name!r} has NaN or infinity as float32, at step {step}")


def _ranges(bounds: Bounds) -> str:
    """Bounds in words: once where all numbers have the same."""
    each = [f"[{low:g}, {high:g}]" for low, high in bounds]
    return each[0] if len(set(each)) == 1 else ", ".join(each)


def _check_file(path: Path, info: DemonstrationsInfo, bounds: Bounds) -> None:
    """Raise `DataError` unless an episode's file holds what its folder says.

    Reads its actions and numbers, and of images and texts the shapes alone: they may be many
    gigabytes.
    """
    with _explained(path), np.load(path, allow_pickle=False) as arrays:
        action = arrays[ACTION]
        _check_action(action, info, bounds)
        _check_parts(arrays, info, "", len(action))
        _check_numbers(arrays, STATE)
        if info.transitions:
            _check_parts(arrays, info, LAST, 1)
            _check_numbers(arrays, f"{LAST}{STATE}")
            _check_outcome(arrays[REWARD], arrays[TERMINATED], len(action))


def _check_parts(arrays: Any, info: DemonstrationsInfo, prefix: str, steps: int) -> None:
    """Raise `ValueError` unless the file has every part, by its name after the prefix."""
    for part in info.observation.parts:
        name = f"{prefix}{part.name}"
        with arrays.zip.open(f"{name}.npy") as file:
            shape, dtype = _header(file)
        wanted = (steps, *part.shape)
        if shape != wanted or not np.can_cast(dtype, part.dtype, "same_kind"):
            raise ValueError(
                f"{name!r} is {dtype} {list(shape)}, not {np.dtype(part.dtype)} {list(wanted)}"
            )


def _check_outcome(reward: NDArray[Any], terminated: NDArray[Any], steps: int) -> None:
    """Raise `ValueError` unless these are an episode's rewards, and whether it ended for good."""
    if reward.shape != (steps,) or reward.dtype.kind not in "fiu":
        raise ValueError(
            f"{REWARD!r} is {reward.dtype} {list(reward.shape)}, not float32 [{steps}]"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(reward.astype(np.float32))
    if not finite.all():
        step = np.flatnonzero(~finite)[0]
        raise ValueError(f"{REWARD!r} has NaN or infinity as float32, at step {step}")
    if terminated.shape or terminated.dtype != np.bool_:
        raise ValueError(
            f"{TERMINATED!r} is {terminated.dtype} {list(terminated.shape)}, not one truth value"
        )


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array in numpy's format, without the array."""
    numpy_format: Any = np.lib.format  # numpy leaves its functions untyped
    first = numpy_format.read_magic(file) == (1, 0)
    read = numpy_format.read_array_header_1_0 if first else numpy_format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file in whatever is wrong with it."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(path)!r} is no episode of these demonstrations: {error}") from error


def chunks_of(episodes: Sequence[DemonstratedEpisode], length: int) -> Chunks:
    """Return a sample for each step: what was shown, and the next ``length`` actions."""
    actions, there = zip(*(_windows(one.action, length) for one in episodes), strict=True)
    return Chunks(
        np.concatenate([one.observation for one in episodes]),
        np.concatenate(actions),
        np.concatenate(there),
    )


def _windows(action: NDArray[Any], length: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    steps = len(action)
    if action.ndim == 1:
        return action, np.ones((steps, 1), np.bool_)
    index = np.arange(steps)[:, None] + np.arange(length)
    there = index < steps
    windows = action[np.minimum(index, steps - 1)]
    return np.where(there[..., None], windows, np.float32(0.0)), there


def episode_of(arrays: Any, info: DemonstrationsInfo) -> DemonstratedEpisode:
    """Return an episode, of arrays by the names in its file."""
    action = arrays[ACTION].astype(np.int64 if info.discrete else np.float32)
    seen = _shown(arrays, info.observation, "", len(action))
    success = bool(arrays[SUCCESS]) if SUCCESS in arrays else None
    if not info.transitions:
        return DemonstratedEpisode(seen, action, success=success)
    outcome = Outcome(
        arrays[REWARD].astype(np.float32),
        _shown(arrays, info.observation, LAST, 1),
        bool(arrays[TERMINATED]),
    )
    return DemonstratedEpisode(seen, action, outcome, success)


def _shown(arrays: Any, spec: ObservationSpec, prefix: str, steps: int) -> ObservationArray:
    """Observations, from the parts by their names after the prefix."""
    seen = spec.empty(steps)
    if spec.flat:
        seen[:] = arrays[f"{prefix}{STATE}"]
    else:
        for part in spec.parts:
            seen[part.name] = arrays[f"{prefix}{part.name}"]
    return seen


def _file(folder: Path, number: int) -> Path:
    return folder / f"episode_{number:06d}.npz"


def _actions(size: int, discrete: bool) -> str:
    return "one choice" if discrete else f"{size} numbers"
