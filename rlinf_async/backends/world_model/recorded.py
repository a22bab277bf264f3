"""Recorded episodes, as windows of steps that a world model predicts.

A window begins with one observation, and goes on over the actions, rewards, observations and the
end that followed it. What comes after the end of an episode is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_async.backends.world_model.config import WorldModelInfo
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import (
    Bounds,
    DemonstratedEpisode,
    DemonstrationsInfo,
    check_demonstrations,
    read_episodes,
    read_info,
)
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.spaces import EnvSpec, ObservationArray


class Window(NamedTuple):
    """``B`` windows of ``H`` steps."""

    first: ObservationArray
    """``[B, ...]``: before the first step"""
    shown: ObservationArray
    """``[B, N, ...]``: after ``N`` of the steps, of which 0 is none"""
    seen: NDArray[np.bool_]
    """``[B, N]``: False after the end of the episode"""
    action: Floats
    """``[B, H, A]``, as the model gets them"""
    reward: Floats
    """``[B, H]``"""
    terminated: Floats
    """``[B, H]``: 1 where the episode ended for good"""
    there: NDArray[np.bool_]
    """``[B, H]``: False after the end of the episode"""


class Recorded:
    """Episodes one behind the other; an episode of ``T`` steps has ``T + 1`` observations."""

    def __init__(self, episodes: Sequence[DemonstratedEpisode], actions: Sequence[Floats]) -> None:
        self.lengths = np.array([len(one.action) for one in episodes])
        """steps of each episode"""
        last = [one.outcome.last_observation for one in episodes if one.outcome is not None]
        shown = zip((one.observation for one in episodes), last, strict=True)
        self.observation: ObservationArray = np.concatenate([one for both in shown for one in both])
        """``[steps + episodes, ...]``"""
        self._action = np.concatenate(actions)
        outcomes = [one.outcome for one in episodes if one.outcome is not None]
        self.reward: Floats = np.concatenate([one.reward for one in outcomes])
        """``[steps]``"""
        self._terminated = np.array([one.terminated for one in outcomes])
        self._step = np.concatenate([[0], np.cumsum(self.lengths)])
        self._episode_of = np.repeat(np.arange(len(episodes)), self.lengths)

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return len(self.reward)

    def draw(self, generator: np.random.Generator, count: int) -> tuple[Any, Any]:
        """Draw where windows begin: episodes, and steps in them.

        Half of them begin where their episode does: those alone are as long as it is.
        """
        step = generator.integers(self.steps, size=count)
        episode = self._episode_of[step]
        start = np.where(np.arange(count) % 2, step - self._step[episode], 0)
        return episode, start

    def windows(self, episode: Any, start: Any, length: int, shown: Any) -> Window:
        """Return the windows of ``length`` steps that begin there, with what is shown after those
        steps ``[N]``, 0 to ``length``."""
        ends = self.lengths[episode][:, None]
        step = start[:, None] + np.arange(length)
        there = step < ends
        at = self._step[episode][:, None] + np.minimum(step, ends - 1)
        after = start[:, None] + shown
        first = self._step[episode] + episode
        return Window(
            self.observation[first + start],
            self.observation[first[:, None] + np.minimum(after, ends)],
            after <= ends,
            self._action[at],
            self.reward[at],
            (self._terminated[episode][:, None] & (step == ends - 1)).astype(np.float32),
            there,
        )

    def starts(self, generator: np.random.Generator, count: int) -> tuple[Any, NDArray[np.bool_]]:
        """Return at most ``count`` observations, and which of them an episode began with: all
        first ones where they are few enough, and others that were not the last."""
        firsts = self._step[:-1] + np.arange(len(self.lengths))
        others = np.arange(self.steps) + self._episode_of
        others = np.setdiff1d(others, firsts)
        firsts = generator.permutation(firsts)[:count]
        others = generator.permutation(others)[: count - len(firsts)]
        first = np.arange(len(firsts) + len(others)) < len(firsts)
        return self.observation[np.concatenate([firsts, others])], first


def check_recorded(folder: Path, spec: EnvSpec, env: str) -> DemonstrationsInfo:
    """Return what a folder of recorded episodes holds.

    Raises:
        DataError: they have no transitions, or are of another environment.
    """
    bounds = _bounds_in(read_info(folder, spec.observation), spec)
    info = check_demonstrations(
        folder,
        spec.observation,
        spec.action.columns,
        discrete=spec.action.discrete,
        bounds=bounds,
        transitions=True,
    )
    if info.env != env:
        raise DataError(
            f"the episodes in {str(folder)!r} are of {info.env}, but the model is to be of {env}: "
            "record them in this environment; or write its name into their demonstrations.json, "
            "where it is the same"
        )
    return info


def _bounds_in(info: DemonstrationsInfo, spec: EnvSpec) -> Bounds:
    """Within which actions were recorded: -1 and 1 with ``env.actions = "rescale"``."""
    rescaled = ((-1.0, 1.0),) * len(spec.bounds)
    return rescaled if info.bounds == rescaled else spec.bounds


def load_recorded(
    folders: Sequence[str], info: WorldModelInfo, held_out: int
) -> tuple[Recorded, Recorded | None]:
    """Read the episodes to learn from, and those that are held out: the last of all.

    Raises:
        DataError: there are too few; none is as long as the model looks ahead; or a text changes
            within an episode.
    """
    episodes: list[DemonstratedEpisode] = []
    actions: list[Floats] = []
    for folder in folders:
        found = read_info(Path(folder), info.observation)
        bounds = _bounds_in(found, info.spec)
        for number, one in enumerate(read_episodes(Path(folder), info.observation)):
            _check_texts(one, info, f"episode {number} of {folder!r}")
            episodes.append(one)
            actions.append(as_input(one.action, info, bounds))
    if len(episodes) <= held_out:
        raise DataError(
            f"there are {len(episodes)} episodes, and {held_out} are held out: none is left to "
            "learn from"
        )
    split = len(episodes) - held_out
    learnt = Recorded(episodes[:split], actions[:split])
    longest = int(learnt.lengths.max())
    if longest < info.sizes.horizon:
        raise DataError(
            f"the longest episode has {longest} steps, and the model is to predict "
            f"{info.sizes.horizon} (model.horizon): it would never learn the last ones"
        )
    kept = Recorded(episodes[split:], actions[split:]) if held_out else None
    return learnt, kept


def as_input(action: NDArray[Any], info: WorldModelInfo, bounds: Bounds) -> Floats:
    """Return actions ``[N, A]`` as the model gets them: choices one-hot, numbers with finite bounds
    within [-1, 1]."""
    if info.action.discrete:
        chosen: Floats = np.eye(info.action_size, dtype=np.float32)[np.asarray(action).reshape(-1)]
        return chosen
    values = np.asarray(action, np.float32).reshape(len(action), -1)
    if not bounds:
        return values
    low, high = np.array(bounds, np.float64).T
    finite = np.isfinite(low) & np.isfinite(high) & (high > low)
    low, width = np.where(finite, low, 0.0), np.where(finite, high - low, 2.0)
    scaled: Floats = ((values - low) * (2.0 / width) - finite).astype(np.float32)
    return scaled


def _check_texts(one: DemonstratedEpisode, info: WorldModelInfo, where: str) -> None:
    for part in info.observation.of_kind("text"):
        said = one.observation[part.name]
        if (said != said[:1]).any():
            raise DataError(
                f"{where}: the text {part.name!r} changes, and a world model holds a text for the "
                "same in a whole episode"
            )
