"""Questions of a stage about its environments, and who answers them.

A policy in another process is asked over channels, one in the same process by a call::

    OverChannels(observations, actions)     Observations ---> rollout workers ---> Actions, own key
    RolloutWorker.answering(weights)        a call: nothing is queued, no task changes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.embodied import Actions, Floats, Observations, stage_key
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.workers.env.config import RolloutGone

Answering: TypeAlias = Callable[[Observations], Awaitable[Actions]]
"""Answers a question with the actions of a policy."""


class OverChannels:
    """The rollout workers at the other ends of two channels.

    Invariant: returns the answer to the question itself. A rollout worker that died after it had
    answered leaves a second answer to the same question, and a stage that was restarted or
    cancelled leaves one to a question that is not open any more: both are dropped, and counted.
    """

    def __init__(self, observations: Sender[Observations], actions: Receiver[Actions]) -> None:
        self._observations, self._actions = observations, actions
        self.dropped = 0
        """answers to other questions than the open one"""

    async def __call__(self, question: Observations) -> Actions:
        """Ask, and wait for the answer.

        Raises:
            RolloutGone: the channel of answers has ended.
        """
        key = stage_key(question.env_rank, question.stage)
        await self._observations.put(question, weight=len(question.observation))
        while not _fits(question, answer := await self._next(key)):
            self.dropped += 1
        return answer

    async def _next(self, key: str) -> Actions:
        try:
            return await self._actions.get(key=key)
        except EndOfChannel as error:
            raise RolloutGone(
                f"channel {self._actions.channel_name!r} has ended while stage {key} waits for its "
                "actions: the rollout workers must go on until the env workers are done"
            ) from error


def _fits(question: Observations, answer: Actions) -> bool:
    return answer.sequence == question.sequence and answer.incarnation == question.incarnation


class Conversation:
    """The questions of one stage; evaluation has the number after the last stage."""

    def __init__(self, env_rank: int, stage: int, incarnation: int) -> None:
        self._env_rank = env_rank
        self._stage = stage
        self._incarnation = incarnation
        self._sequence = 0

    async def ask(
        self,
        answering: Answering,
        observation: ObservationArray,
        *,
        min_version: int,
        final_observation: ObservationArray | None = None,
        value_only: bool = False,
        deterministic: bool = False,
        memory: Floats | None = None,
        final_memory: Floats | None = None,
    ) -> Actions:
        """Ask about ``observation [E, D]``, return the answer; raises what ``answering`` does."""
        self._sequence += 1
        return await answering(
            Observations(
                env_rank=self._env_rank,
                stage=self._stage,
                incarnation=self._incarnation,
                sequence=self._sequence,
                observation=observation,
                min_version=min_version,
                value_only=value_only,
                final_observation=final_observation,
                deterministic=deterministic,
                memory=memory,
                final_memory=final_memory,
            )
        )
