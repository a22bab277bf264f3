"""Episodes of the deterministic policy, each from a fixed seed.

An episode starts from its own seed, in whichever environment is free, and each one counts, however
long it takes: short episodes are not favoured. The same weights give the same result if
``reset(seed)`` clears all state of the episode before. Which episodes share a forward pass depends
on timing and on the number of workers, and can change the last bits of an action.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from rlinf_async.messages.embodied import Choice, Floats
from rlinf_async.messages.spaces import ObservationSpec, Seen
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.seeds import episode_seed
from rlinf_async.workers.env.slot import Episode, Slot

log = logging.getLogger(__name__)

LONG_EPISODE: Final = 20_000
"""steps after which an episode is warned of, and again after every doubling: it may never end"""


class EvaluatedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of an evaluation."""

    episode: int
    """number of the episode, from 0 over all env workers"""
    episode_return: float
    """undiscounted"""
    length: int
    """steps"""
    success: bool | None
    """None where the environment does not report it"""
    version: int
    """version of the oldest weights that acted in it"""


class Evaluation:
    """This worker's episodes of one evaluation, a few at a time."""

    def __init__(
        self,
        slots: Sequence[Slot],
        spec: ObservationSpec,
        actions: ActionReader,
        episodes: Iterator[int],
        seed: int,
    ) -> None:
        self._idle = list(slots)
        self._waiting = episodes
        self._actions = actions
        self._seed = seed
        self._spec = spec
        self._running: list[tuple[Slot, int, int | None]] = []
        self._rows: list[Seen] = []
        self._warn_at = LONG_EPISODE
        self.memory: Floats | None = None
        """``[E, H]``: what a recurrent policy remembers of the running episodes"""
        self.done: list[EvaluatedEpisode] = []

    @property
    def observation(self) -> Seen:
        """``[E, D]`` of the running episodes, which become fewer towards the end."""
        return np.stack(self._rows)

    def begin(self) -> bool:
        """Begin episodes in free environments; return whether any run."""
        while self._idle and (episode := next(self._waiting, None)) is not None:
            slot = self._idle.pop()
            row = self._spec.empty()
            slot.reset(row, episode_seed(self._seed, episode))
            slot.check(row)
            self._rows.append(row)
            self._running.append((slot, episode, None))
        if self.memory is not None:
            new = len(self._running) - len(self.memory)
            self.memory = np.pad(self.memory, ((0, new), (0, 0)))  # of zeros: they begin
        return bool(self._running)

    def _warn(self, slot: Slot, episode: int) -> None:
        self._warn_at *= 2
        log.warning(
            "episode %d of the evaluation, in %s, has not ended after %d steps: an environment has "
            "to terminate or truncate its episodes, or the evaluation never ends; wrap it in "
            "gymnasium.wrappers.TimeLimit, or register it with max_episode_steps",
            episode,
            slot.label,
            slot.length,
        )

    def close(self) -> None:
        """Nothing: the environments are kept for the next evaluation."""

    def step(self, answer: Choice | None, version: int) -> None:
        """Take one step in every running episode."""
        actions = self._actions.read(answer, len(self._running))
        running, self._running, self._rows = self._running, [], []
        go_on: list[int] = []
        for place, ((slot, episode, oldest), action) in enumerate(
            zip(running, actions, strict=True)
        ):
            row = self._spec.empty()
            _, _, _, ended = slot.step(action, row)
            slot.check(row)
            acted = version if oldest is None else min(version, oldest)
            if ended is None:
                if slot.length >= self._warn_at:
                    self._warn(slot, episode)
                self._running.append((slot, episode, acted))
                self._rows.append(row)
                go_on.append(place)
            else:
                self._idle.append(slot)
                self.done.append(_evaluated(episode, ended, acted))
        if self.memory is not None:
            self.memory = self.memory[go_on]


def _evaluated(number: int, ended: Episode, version: int) -> EvaluatedEpisode:
    return EvaluatedEpisode(
        episode=number,
        episode_return=ended.episode_return,
        length=ended.length,
        success=ended.success,
        version=version,
    )
