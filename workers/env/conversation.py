"""One stage's questions to the rollout workers, and their answers.

Invariant: `ask` returns the answer to its own question. A rollout worker that died after it had
answered leaves a second answer to the same question, and a stage that was restarted or cancelled
leaves one to a question that is not open any more: both are dropped, and counted.
"""

from __future__ import annotations

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.embodied import Actions, Floats, Observations, stage_key
from rlinf_async.messages.spaces import Seen
from rlinf_async.workers.env.errors import RolloutGone


class Conversation:
    """Asks under the key of one stage; evaluation has the number after the last stage."""

    def __init__(self, env_rank: int, stage: int, incarnation: int) -> None:
        self._env_rank = env_rank
        self._stage = stage
        self._incarnation = incarnation
        self._key = stage_key(env_rank, stage)
        self._sequence = 0
        self.dropped = 0
        """answers to other questions than the open one"""

    async def ask(
        self,
        observations: Sender[Observations],
        actions: Receiver[Actions],
        observation: Seen,
        *,
        min_version: int,
        final_observation: Seen | None = None,
        value_only: bool = False,
        deterministic: bool = False,
        memory: Floats | None = None,
        final_memory: Floats | None = None,
    ) -> Actions:
        """Ask about ``observation [E, D]`` and wait for the answer.

        Raises:
            RolloutGone: the channel of answers has ended.
        """
        self._sequence += 1
        question = Observations(
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
        await observations.put(question, weight=len(observation))
        while not self._fits(answer := await self._next(actions)):
            self.dropped += 1
        return answer

    def _fits(self, answer: Actions) -> bool:
        return answer.sequence == self._sequence and answer.incarnation == self._incarnation

    async def _next(self, actions: Receiver[Actions]) -> Actions:
        try:
            return await actions.get(key=self._key)
        except EndOfChannel as error:
            raise RolloutGone(
                f"channel {actions.channel_name!r} has ended while stage {self._key} waits for its "
                "actions: the rollout workers must go on until the env workers are done"
            ) from error
