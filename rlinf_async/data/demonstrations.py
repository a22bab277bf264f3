"""Demonstrations: episodes of somebody who can do the task, in a folder.

::

    demonstrations.json       what is shown and done: the parts of an observation, the action's size
    episode_000000.npz        an array for each part, ``[T, ...]``, and ``action [T, A]``
    episode_000001.npz        ...

Images are uint8 and texts UTF-8 bytes, as in `rlinf_async.messages.spaces`; actions are those of
the policy: with ``env.actions = "rescale"`` bounds are -1 and 1. A folder of LeRobot's format is
read too: see `lerobot`.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.data.errors import DataError
from rlinf_async.data.lerobot import is_lerobot, lerobot_arrays, lerobot_info, lerobot_spec
from rlinf_async.messages.spaces import STATE, ObservationSpec, Seen

FILE: Final = "demonstrations.json"
ACTION: Final = "action"


class DemonstrationsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of demonstrations holds."""

    env: str
    """name of the environment"""
    observation: ObservationSpec
    action_size: int
    """numbers of an action; choices are one number"""
    discrete: bool = False
    episodes: int
    successes: int | None = None
    """episodes that succeeded; None where the environment does not say"""


class Episode(msgspec.Struct, frozen=True):
    """One demonstrated episode of ``T`` steps."""

    observation: Seen
    """``[T, D]``, or structured ``[T]``"""
    action: NDArray[Any]
    """float32 ``[T, A]``, or int64 ``[T]``"""


class Chunks(msgspec.Struct, frozen=True):
    """Every step of every episode, with the actions that follow it."""

    observation: Seen
    """``[N, ...]``"""
    action: NDArray[Any]
    """``[N, H, A]`` (int64 ``[N]`` of choices), 0 after the end of an episode"""
    there: NDArray[np.bool_]
    """``[N, H]``: False after the end of an episode"""


def write_episode(folder: Path, number: int, episode: Episode) -> None:
    """Write one episode's file."""
    names = episode.observation.dtype.names
    arrays: dict[str, Any] = {ACTION: episode.action}
    if names is None:
        arrays[STATE] = episode.observation
    else:
        arrays |= {name: episode.observation[name] for name in names}
    np.savez_compressed(_file(folder, number), **arrays)


def write_info(folder: Path, info: DemonstrationsInfo) -> None:
    """Write what the folder holds, after the episodes."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2))


def read_info(folder: Path, wanted: ObservationSpec | None = None) -> DemonstrationsInfo:
    """Return what the folder holds; raises `DataError` for one that has no demonstrations.

    Of a folder of LeRobot only the ``wanted`` parts are looked at.
    """
    if is_lerobot(folder):
        found = lerobot_info(folder)
        return DemonstrationsInfo(
            env=str(found.get("robot_type") or folder.name),
            observation=lerobot_spec(folder, wanted or ObservationSpec()),
            action_size=int(np.prod(found["features"]["action"]["shape"])),
            episodes=int(found["total_episodes"]),
        )
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=DemonstrationsInfo)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{str(folder)!r} holds no demonstrations: its {FILE} cannot be read: {error}; "
            "`rlinf-async demonstrations` records them"
        ) from error


def read_episodes(folder: Path, wanted: ObservationSpec | None = None) -> Iterator[Episode]:
    """Read all episodes. Raises `DataError` for a file that is damaged or of another shape."""
    info = read_info(folder, wanted)
    if is_lerobot(folder):
        for found in lerobot_arrays(folder, info.observation):
            yield _episode(found, info.observation)
        return
    for number in range(info.episodes):
        path = _file(folder, number)
        with _explained(path), np.load(path, allow_pickle=False) as arrays:
            episode = _episode(arrays, info.observation)
        yield episode


def check_demonstrations(
    folder: Path, observation: ObservationSpec, action_size: int, *, discrete: bool
) -> DemonstrationsInfo:
    """Return what the folder holds; raises `DataError` unless it fits these spaces."""
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
    if not is_lerobot(folder):
        for number in range(info.episodes):
            _check_file(_file(folder, number), info)
    return info


def _check_file(path: Path, info: DemonstrationsInfo) -> None:
    """Raise `DataError` unless an episode's file holds what its folder says.

    Reads its actions, and of what is shown the shapes alone: images may be many gigabytes.
    """
    with _explained(path), np.load(path, allow_pickle=False) as arrays:
        action = arrays[ACTION]
        if info.discrete:
            if action.ndim != 1 or action.dtype.kind not in "iu":
                raise ValueError(f"its actions are {action.dtype} {list(action.shape)}, no choices")
        elif action.shape != (len(action), info.action_size):
            raise ValueError(
                f"its actions have shape {list(action.shape)}, not {info.action_size} numbers each"
            )
        elif not np.isfinite(action).all():
            raise ValueError("an action is NaN or infinite")
        for part in info.observation.parts:
            with arrays.zip.open(f"{part.name}.npy") as file:
                shape, dtype = _header(file)
            wanted = (len(action), *part.shape)
            if shape != wanted or not np.can_cast(dtype, part.dtype, "same_kind"):
                raise ValueError(
                    f"{part.name!r} is {dtype} {list(shape)}, not {np.dtype(part.dtype)} "
                    f"{list(wanted)}"
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


def chunks_of(episodes: Sequence[Episode], length: int) -> Chunks:
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


def _episode(arrays: Any, spec: ObservationSpec) -> Episode:
    action = arrays[ACTION]
    seen = spec.empty(len(action))
    if spec.flat:
        seen[:] = arrays[STATE]
    else:
        for part in spec.parts:
            seen[part.name] = arrays[part.name]
    return Episode(seen, action)


def _file(folder: Path, number: int) -> Path:
    return folder / f"episode_{number:06d}.npz"


def _actions(size: int, discrete: bool) -> str:
    return "one choice" if discrete else f"{size} numbers"
