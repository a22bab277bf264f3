"""The trajectory of one stage, while it is collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.described import EnvError
from rlinf_async.messages.embodied import (
    Actions,
    Collect,
    Floats,
    Ints,
    Trajectory,
    all_counts,
)
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.workers.env.stage import Episode, StageOutcome

Place = int | tuple[Ints, Ints]
"""The samples of an answer or outcome in arrays ``[T, E, ...]``: one step of all environments, or
a step of each of some."""


class _Cut(NamedTuple):
    """Episodes that were cut, or ended: where in the trajectory, and what they showed last."""

    steps: Ints
    """``[K]``"""
    envs: Ints
    """``[K]``"""
    observation: ObservationArray
    """``[K, D]``"""
    memory: Floats | None
    """``[K, H]``: what a recurrent policy remembers of them"""


class Record:
    """Takes answers and outcomes, and gives a `Trajectory`: as many steps of each environment.

    An answer also completes steps before it: it has the values of the observations at which
    episodes were cut since the last answer.
    """

    def __init__(
        self,
        ticket: Collect,
        env_rank: int,
        stage: int,
        like: ObservationArray,
        incarnation: int = 0,
        memory: Floats | None = None,
        epoch: int = 0,
    ) -> None:
        """``like`` is an array of the stage's observations, ``[E, D]``; ``memory`` is what a
        recurrent policy remembers before the first step, ``[E, H]``; ``epoch`` counts those of the
        ticket."""
        steps, envs = ticket.steps, len(like)
        self._length, self._envs = steps, envs
        self._step = 0
        """steps that all environments have taken together"""
        self._steps = np.zeros(envs, np.int64)
        """``[E]``: steps that each has taken, where some get ready before others"""
        self._apart = False
        """whether some have got ready before others"""
        self._cut: list[_Cut] = []
        self._terminal: list[_Cut] = []
        """those that terminated"""
        self._transitions, self._levels = ticket.transitions, ticket.level is not None
        self._episodes: list[tuple[int, int, Episode]] = []
        """step, environment, and the episode that ended there"""
        self._made = Trajectory(
            iteration=ticket.iteration,
            env_rank=env_rank,
            stage=stage,
            epoch=epoch,
            observation=np.empty((steps, *like.shape), like.dtype),
            action=np.empty(0, np.float32),  # its shape comes with the first answer
            log_prob=np.empty((steps, envs), np.float32),
            value=np.empty((steps + 1, envs), np.float32),
            reward=np.empty((steps, envs), np.float32),
            terminated=np.empty((steps, envs), np.bool_),
            truncated=np.empty((steps, envs), np.bool_),
            final_value=np.zeros((steps, envs), np.float32),
            version=np.full(steps, np.iinfo(np.int64).max),
            incarnation=incarnation,
            memory=memory,
        )

    @property
    def full(self) -> bool:
        """Whether every environment has taken its steps."""
        if not self._apart:
            return self._step == self._length
        return int(self._steps.min()) == self._length

    def unfinished(self, rows: Ints | None) -> Ints | None:
        """Return the environments of ``rows`` that have steps to take; None: all of the stage."""
        return None if rows is None else rows[self._steps[rows] < self._length]

    def finished(self, rows: Ints | None) -> Ints | None:
        """Return the environments of ``rows`` that have taken all their steps; None: all of the
        stage."""
        if rows is None:
            return None if self.full else np.empty(0, np.int64)
        done: Ints = rows[self._steps[rows] == self._length]
        return done

    def unvalued(self) -> tuple[ObservationArray | None, Floats | None]:
        """Last observations ``[K, D]`` of cut episodes, whose values are still to be asked for, and
        what a recurrent policy remembers of them."""
        if self._transitions or not self._cut:
            return None, None
        if len(self._cut) == 1:
            return self._cut[0].observation, self._cut[0].memory
        memories = [cut.memory for cut in self._cut if cut.memory is not None]
        return (
            np.concatenate([cut.observation for cut in self._cut]),
            np.concatenate(memories) if memories else None,
        )

    def acted(
        self, observation: ObservationArray, answer: Actions, rows: Ints | None = None
    ) -> None:
        """Record the answer to ``observation`` of the environments of ``rows``; None: of all."""
        place = self._place(rows)
        self._values(answer, place)
        made = self._made
        if answer.action is None or answer.log_prob is None:
            raise EnvError(f"the rollout worker answered {answer!r} to a question for actions")
        if not len(made.action):
            made.action = self._like(answer.action, self._length)
        made.observation[place] = observation
        made.action[place] = answer.action
        if answer.log_prob.ndim != made.log_prob.ndim - 1:  # one for each token
            made.log_prob = self._like(answer.log_prob, self._length)
        made.log_prob[place] = answer.log_prob
        if answer.chain is not None:
            if made.chain is None:
                made.chain = self._like(answer.chain, self._length)
            made.chain[place] = answer.chain
        if answer.intervened is not None:
            if made.intervened is None:
                made.intervened = np.zeros_like(made.terminated)
            made.intervened[place] = answer.intervened
        if answer.label is not None:
            if made.label is None:
                made.label = np.zeros_like(made.action)
            made.label[place] = answer.label
        # Where environments take a step at different times, the oldest weights count.
        at = place if isinstance(place, int) else place[0]
        made.version[at] = np.minimum(made.version[at], answer.version)

    def stepped(self, outcome: StageOutcome, final_memory: Floats | None = None) -> None:
        """Record the outcome of a step; ``final_memory [K, H]`` is that of cut episodes."""
        made, place = self._made, self._place(outcome.rows)
        made.reward[place] = outcome.reward
        if outcome.action_reward is not None and outcome.executed is not None:
            if made.action_reward is None or made.executed is None:
                made.action_reward = self._like(outcome.action_reward, self._length)
                made.executed = self._like(outcome.executed, self._length)
            made.action_reward[place] = outcome.action_reward
            made.executed[place] = outcome.executed
        made.control = all_counts((made.control, outcome.control))
        made.terminated[place] = outcome.terminated
        made.truncated[place] = outcome.truncated
        if outcome.valid is not None:
            if made.valid is None:
                made.valid = np.ones_like(made.terminated)
            made.valid[place] = outcome.valid
        if outcome.final_observation is not None:
            steps, envs = self._at(place, outcome.truncated)
            self._cut.append(_Cut(steps, envs, outcome.final_observation, final_memory))
        if self._transitions and outcome.terminal_observation is not None:
            steps, envs = self._at(place, outcome.terminated)
            self._terminal.append(_Cut(steps, envs, outcome.terminal_observation, None))
        if outcome.episodes:
            steps, envs = self._at(place, outcome.terminated | outcome.truncated)
            self._episodes += zip(steps.tolist(), envs.tolist(), outcome.episodes, strict=True)
        if outcome.rows is None:
            self._step += 1
        else:
            self._steps[outcome.rows] += 1
            self._apart = True

    def finish(self, answer: Actions) -> Trajectory:
        """Record the last answer, which has values only, and return the trajectory."""
        self._values(answer, self._length)
        return self._finished()

    def finish_transitions(self, observation: ObservationArray) -> Trajectory:
        """Record the observations ``[E, D]`` after the last step, and return the trajectory."""
        made = self._made
        made.last_observation = observation
        if self._cut:
            made.final_observation = _in_order(self._cut)
        # Of a simulator of many they may be missing, of some or of all.
        if sum(len(one.steps) for one in self._terminal) == int(made.terminated.sum()) > 0:
            made.terminal_observation = _in_order(self._terminal)
        made.value[-1] = 0.0  # there is none: nobody was asked
        return self._finished()

    def _finished(self) -> Trajectory:
        made = self._made
        for _, _, episode in sorted(self._episodes, key=lambda ended: ended[:2]):
            made.episode_return.append(episode.episode_return)
            made.episode_length.append(episode.length)
            made.episode_success.append(episode.success)
            if self._levels:
                made.episode_level.append(episode.level)
        return made

    def _place(self, rows: Ints | None) -> Place:
        return self._step if rows is None else (self._steps[rows], rows)

    def _at(self, place: Place, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Steps and environments of the chosen samples."""
        if isinstance(place, int):
            envs = np.flatnonzero(chosen)
            return np.full(len(envs), place), envs
        return place[0][chosen], place[1][chosen]

    def _values(self, answer: Actions, place: Place) -> None:
        made = self._made
        if answer.value.ndim != made.value.ndim - 1:  # one for each action of a chunk
            made.value = self._like(answer.value, self._length + 1)
        made.value[place] = answer.value
        if self._cut and not self._transitions:
            if answer.final_value is None:
                raise EnvError("the rollout worker left out the values of final observations")
            # Of the values of a chunk's actions, the first is that of the observation itself.
            final = answer.final_value
            steps = np.concatenate([cut.steps for cut in self._cut])
            envs = np.concatenate([cut.envs for cut in self._cut])
            made.final_value[steps, envs] = final if final.ndim == 1 else final[:, 0]
            self._cut.clear()

    def _like(self, rows: NDArray[Any], steps: int) -> NDArray[Any]:
        """An array ``[steps, E, ...]`` for such rows ``[..., ...]``."""
        return np.empty((steps, self._envs, *rows.shape[1:]), rows.dtype)


def _in_order(ended: Sequence[_Cut]) -> ObservationArray:
    """Last observations of episodes, in the order of steps, then envs."""
    steps = np.concatenate([one.steps for one in ended])
    envs = np.concatenate([one.envs for one in ended])
    last = np.concatenate([one.observation for one in ended])
    ordered: ObservationArray = last[np.lexsort((envs, steps))]
    return ordered
