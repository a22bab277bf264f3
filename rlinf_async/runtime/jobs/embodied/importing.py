"""Episodes from elsewhere, as demonstrations in an environment: a data set in RLDS is read, and
each part of what the environment shows is found among its features.

::

    RLDS: observation/image, action, ...  --parts-->  image, state, action of the environment
                                                            |
                                          demonstrations.json, episode_000000.npz, ...

Actions are those of the environment, as a script's are: with ``env.actions = "rescale"`` they
are written in [-1, 1].
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import (
    ACTION,
    LAST,
    REWARD,
    TERMINATED,
    DemonstrationsInfo,
    episode_of,
    outside,
    write_episode,
    write_info,
)
from rlinf_async.data.lerobot import texts
from rlinf_async.data.rlds import Feature, RldsFolder
from rlinf_async.messages.converting import ActionReader, ObservationWriter, answer_for, ends_of
from rlinf_async.messages.spaces import ObservationPart
from rlinf_async.runtime.jobs.embodied.playing import box_or_choice, new_folder
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.workers.env.make import NamedEnv

LIKELY: Final = {
    "image": ("observation/{name}", "observation/image_{name}", "observation/{name}_image"),
    "state": ("observation/{name}",),
    "text": (
        "{name}",
        "observation/{name}",
        "language_instruction",
        "observation/natural_language_instruction",
    ),
}
"""where a part is looked for that no ``--part`` names"""


class RldsSource(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a data set."""

    folder: Path
    split: str = "train"
    parts: dict[str, tuple[str, ...]] = {}
    """features of each part of an observation, and of ``action``; several are joined"""
    episodes: int | None = None
    """None: all"""
    resize: bool = False
    """whether images of another size are brought to that of the environment"""
    last_step: Literal["", "keep", "drop"] = ""
    """what becomes of action and reward of an episode's last step; empty: they are left out, and a
    reward there is refused"""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What has been written."""

    info: DemonstrationsInfo
    found: dict[str, tuple[str, ...]]
    """features of each part, and of the action"""
    steps: int
    without_actions: int
    """episodes of one step, which are left out"""
    clipped: int
    """steps whose action lay outside of the environment's bounds"""
    resized: tuple[str, ...]
    """images of another size"""


def import_rlds(config: EnvironmentSettings, source: RldsSource, out: Path) -> Imported:
    """Write the episodes of a data set as demonstrations in the environment of a configuration.

    Args:
        config: whose environment says what is shown, and which actions it takes.
        source: the data set, and which of its features are which part.
        out: a folder without files.

    Raises:
        UsageError: ``out`` holds files already.
        DataError: a part is not found or does not fit, or the data set is damaged.
        EnvError: the environment's spaces are not supported.
        MissingExtra: google-crc32c is not installed.
    """
    new_folder(out)
    single = msgspec.structs.replace(config.env, action_chunk=1, group_size=1)
    env = NamedEnv(single)
    try:
        writer = ObservationWriter(env.env.observation_space, single.name)
        reader = ActionReader(env.env.action_space, single.name, single.actions)
        space = box_or_choice(env.env.action_space)
    finally:
        env.close()
    folder = RldsFolder(source.folder, source.split)
    reading = _Reading(folder, source, writer.spec.parts)
    info = DemonstrationsInfo(
        env=single.name,
        observation=writer.spec,
        action_size=reader.spec.columns,
        discrete=reader.spec.discrete,
        episodes=0,
        bounds=reader.bounds,
        transitions={"reward", "is_terminal"} <= set(folder.features),
    )
    out.mkdir(parents=True, exist_ok=True)
    count, steps, clipped = 0, 0, 0
    for where, arrays in itertools.islice(reading.episodes(), source.episodes):
        with _explained(where):
            taken = _taken(arrays[ACTION], space, discrete=info.discrete)
            clipped += 0 if info.discrete else int(outside(taken, ends_of(space)).any(-1).sum())
            rescaled = single.actions == "rescale"
            answers = [answer_for(space, one, info.bounds, rescaled=rescaled) for one in taken]
            arrays[ACTION] = np.concatenate(answers)
            write_episode(out, count, episode_of(arrays, info))
        count, steps = count + 1, steps + len(taken)
    if not count:
        raise DataError(f"{str(source.folder)!r} has no episode with actions in {source.split!r}")
    info = msgspec.structs.replace(info, episodes=count)
    write_info(out, info)
    return Imported(
        info=info,
        found=reading.found,
        steps=steps,
        without_actions=reading.without_actions,
        clipped=clipped,
        resized=tuple(reading.resized),
    )


class _Reading:
    """Episodes as arrays of the parts of an observation, and of the action."""

    def __init__(
        self, folder: RldsFolder, source: RldsSource, parts: tuple[ObservationPart, ...]
    ) -> None:
        """Raises `DataError` for a part that is not found, or does not fit."""
        self._folder, self._parts, self._resize = folder, parts, source.resize
        self._last_step = source.last_step
        self.without_actions = 0
        self.resized: list[str] = []
        known = [*(part.name for part in parts), ACTION]
        if strange := sorted(set(source.parts) - set(known)):
            raise DataError(
                f"--part {strange[0]}: the environment shows {', '.join(known[:-1])}, and takes "
                f"an {ACTION}"
            )
        self.found = {part.name: self._named(part, source.parts) for part in parts}
        self.found[ACTION] = source.parts.get(ACTION, (ACTION,))
        for part in parts:
            self._check([folder.feature(name) for name in self.found[part.name]], part)
        for feature in map(folder.feature, self.found[ACTION]):
            if feature.kind != "numbers":
                raise DataError(f"{feature} is no action, which has numbers: name others, --part")

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read them; those of one step have no action, and are counted."""
        there = [name for name in ("reward", "is_terminal") if name in self._folder.features]
        names = {one for several in self.found.values() for one in several} | set(there)
        for where, read in self._folder.arrays(sorted(names)):
            with _explained(where):
                steps = self._steps(read)
                if self._last_step != "keep":
                    steps -= 1  # of the last step the observation alone counts
                    self._check_last(read)
                if not steps:
                    self.without_actions += 1
                    continue
                made: dict[str, Any] = {}
                for part in self._parts:
                    shown = self._shown(read, part)
                    made[part.name], made[f"{LAST}{part.name}"] = shown[:steps], shown[-1:]
                made[ACTION] = _joined(read, self.found[ACTION])[:steps]
                if "reward" in there:
                    made[REWARD] = read["reward"][:steps].reshape(-1).astype(np.float32)
                if "is_terminal" in there:
                    made[TERMINATED] = np.bool_(read["is_terminal"][-1])
            yield where, made

    def _check_last(self, read: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a reward that would be left out with the last step."""
        reward = float(read["reward"].reshape(-1)[-1]) if "reward" in read else 0.0
        if reward and not self._last_step:
            raise ValueError(
                f"its last step pays {reward:g}, though in RLDS the observation of that step alone "
                "counts: --last-step keep, if its action and reward count (the observation after "
                "it is then the last one again), or --last-step drop"
            )

    def _named(self, part: ObservationPart, given: Mapping[str, tuple[str, ...]]) -> Any:
        if part.name in given:
            return given[part.name]
        likely = [one.format(name=part.name) for one in LIKELY[part.kind]]
        for name in likely:
            if name in self._folder.features:
                return (name,)
        known = ", ".join(map(str, self._folder.features.values()))
        raise DataError(
            f"{str(self._folder.folder)!r} has no {' and no '.join(likely)} for the {part.kind} "
            f"{part.name!r} of the environment: name it with --part {part.name}=FEATURE (several, "
            f"with commas, are joined). Its steps have: {known}"
        )

    def _check(self, features: list[Feature], part: ObservationPart) -> None:
        """Raise `DataError` for features that are no such part."""
        kind = "numbers" if part.kind == "state" else part.kind
        for feature in features:
            pixels = feature.kind == "numbers" and feature.dtype == "uint8"
            if feature.kind != kind and not (kind == "image" and pixels):
                raise DataError(f"{feature} cannot be the {part.kind} {part.name!r}")
        if part.kind != "state" and len(features) > 1:
            raise DataError(f"--part {part.name}: only numbers are joined, this is a {part.kind}")
        size = sum(int(np.prod(feature.shape)) for feature in features)
        if part.kind == "state" and size != part.shape[0]:
            raise DataError(
                f"{' and '.join(map(str, features))}: {size} numbers, but the environment shows "
                f"{part.shape[0]}: name what they are with --part {part.name}=FEATURE,FEATURE"
            )

    def _steps(self, read: Mapping[str, Any]) -> int:
        """Steps of an episode; raises `ValueError` where features have different numbers."""
        counts = {name: len(one) for name, one in read.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"features of different numbers of steps: {counts}")
        return min(counts.values())

    def _shown(self, read: Mapping[str, Any], part: ObservationPart) -> NDArray[Any]:
        """A part of the observations of all steps."""
        if part.kind == "state":
            numbers: NDArray[Any] = _joined(read, self.found[part.name]).astype(np.float32)
            if not np.isfinite(numbers).all():
                raise ValueError(f"{part.name!r} has NaN or infinity")
            return numbers
        [name] = self.found[part.name]
        if part.kind == "text":
            return texts(read[name], part.shape[0], "text")
        return self._images(read[name], part)

    def _images(self, images: NDArray[np.uint8], part: ObservationPart) -> NDArray[np.uint8]:
        wanted = part.shape if len(part.shape) == 3 else (*part.shape, 1)
        if images.shape[1:] == wanted:
            return images.reshape(-1, *part.shape)
        if images.shape[3:] != wanted[2:] or not self._resize:
            raise ValueError(
                f"image {part.name!r} is {list(images.shape[1:])}, but the environment shows "
                f"{list(wanted)}: --resize brings another height and width to it"
            )
        if part.name not in self.resized:
            self.resized.append(part.name)
        pictures: Any = importlib.import_module("PIL.Image")
        small = [
            np.asarray(pictures.fromarray(one.squeeze()).resize(wanted[1::-1])) for one in images
        ]
        return np.stack(small).reshape(-1, *part.shape)


def _joined(read: Mapping[str, Any], names: tuple[str, ...]) -> NDArray[Any]:
    """Numbers of several features, one after the other: ``[T, D]``."""
    parts = [read[name].reshape(len(read[name]), -1) for name in names]
    joined: NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
    return joined


def _taken(action: NDArray[Any], space: Any, *, discrete: bool) -> NDArray[Any]:
    """Actions ``[T, A]`` as the environment takes them.

    Raises:
        ValueError: they are no actions of its space, bounds apart.
    """
    size = 1 if discrete else int(np.prod(space.shape))
    if action.shape[1] != size:
        raise ValueError(
            f"an action of {action.shape[1]} numbers, but the environment takes {size}: name them "
            f"with --part {ACTION}=FEATURE,FEATURE"
        )
    if discrete:
        flat = action.reshape(-1)
        wrong = [
            one for one in flat.tolist() if not float(one).is_integer() or int(one) not in space
        ]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no choice of {space}")
        return flat.astype(np.int64)
    if not np.isfinite(action).all():
        step = int(np.flatnonzero(~np.isfinite(action).all(-1))[0])
        raise ValueError(f"an action with NaN or infinity, at step {step}")
    return action


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Name the episode in whatever is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
