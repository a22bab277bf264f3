"""The trajectory of one stage, while it is collected."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Actions, Collect, Floats, Trajectory
from rlinf_async.messages.spaces import Seen
from rlinf_async.workers.env.errors import EnvError
from rlinf_async.workers.env.stage import Outcome

Number = TypeVar("Number", bound=np.generic)


class Record:
    """Takes answers and outcomes step by step, and gives a `Trajectory`.

    An answer also completes the step before it: it has the values of the observations at which
    episodes were cut in that step.
    """

    def __init__(
        self,
        ticket: Collect,
        env_rank: int,
        stage: int,
        like: Seen,
        incarnation: int = 0,
        memory: Floats | None = None,
        epoch: int = 0,
    ) -> None:
        """``like`` is an array of the stage's observations, ``[E, D]``; ``memory`` is what a
        recurrent policy remembers before the first step, ``[E, H]``; ``epoch`` counts those of the
        ticket."""
        steps, envs = ticket.steps, len(like)
        self._step = 0
        self._cut: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None
        self._final: list[Seen] | None = [] if ticket.transitions else None
        """last observations of cut episodes, where they travel with the trajectory"""
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
            version=np.empty(steps, np.int64),
            incarnation=incarnation,
            memory=memory,
            episode_return=[],
            episode_length=[],
            episode_success=[],
        )

    def acted(self, observation: Seen, answer: Actions) -> None:
        """Record the answer to ``observation``."""
        self._values(answer)
        made, step = self._made, self._step
        if answer.action is None or answer.log_prob is None:
            raise EnvError(f"the rollout worker answered {answer!r} to a question for actions")
        if step == 0:
            made.action = _like(answer.action, len(made.version))
        made.observation[step] = observation
        made.action[step] = answer.action
        if answer.log_prob.shape != made.log_prob[step].shape:  # one for each token
            made.log_prob = _like(answer.log_prob, len(made.version))
        made.log_prob[step] = answer.log_prob
        made.version[step] = answer.version

    def stepped(self, outcome: Outcome) -> None:
        """Record the outcome of the step."""
        made, step = self._made, self._step
        made.reward[step] = outcome.reward
        if outcome.action_reward is not None and outcome.executed is not None:
            if made.action_reward is None or made.executed is None:
                made.action_reward = _like(outcome.action_reward, len(made.version))
                made.executed = _like(outcome.executed, len(made.version))
            made.action_reward[step] = outcome.action_reward
            made.executed[step] = outcome.executed
        made.terminated[step] = outcome.terminated
        made.truncated[step] = outcome.truncated
        if outcome.valid is not None:
            if made.valid is None:
                made.valid = np.ones_like(made.terminated)
            made.valid[step] = outcome.valid
        if self._final is None:
            self._cut = None if outcome.final_observation is None else outcome.truncated
        elif outcome.final_observation is not None:
            self._final.append(outcome.final_observation)
        self._step = step + 1
        for episode in outcome.episodes:
            made.episode_return.append(episode.episode_return)
            made.episode_length.append(episode.length)
            if episode.success is not None:
                made.episode_success.append(episode.success)

    def finish(self, answer: Actions) -> Trajectory:
        """Record the last answer, which has values only, and return the trajectory."""
        self._values(answer)
        return self._made

    def finish_transitions(self, observation: Seen) -> Trajectory:
        """Record the observations ``[E, D]`` after the last step, and return the trajectory."""
        made = self._made
        made.last_observation = observation
        if self._final:
            made.final_observation = np.concatenate(self._final)
        made.value[-1] = 0.0  # there is none: nobody was asked
        return made

    def _values(self, answer: Actions) -> None:
        made = self._made
        if answer.value.ndim != made.value[self._step].ndim:  # one for each action of a chunk
            made.value = _like(answer.value, len(made.version) + 1)
        made.value[self._step] = answer.value
        if self._cut is not None:
            if answer.final_value is None:
                raise EnvError("the rollout worker left out the values of final observations")
            # Of the values of a chunk's actions, the first is that of the observation itself.
            final = answer.final_value
            first = final if final.ndim == 1 else final[:, 0]
            self._made.final_value[self._step - 1][self._cut] = first


def _like(row: NDArray[Number], steps: int) -> NDArray[Number]:
    return np.empty((steps, *row.shape), row.dtype)
