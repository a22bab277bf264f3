"""`LanguageCritic`: adds values to samples, and learns from their returns.

::

    SampleGroup --by rank--> [ values ] --> SampleGroup, by rank, at once: the actor of this rank
                                 |
                                 +--> [ returns -> micro-batches -> steps ] --> report

                      waits for                            unblocked by
    value_and_train   a group of its share                 the collector
                      room for the group                   the actor of its rank
                      the other ranks, group by group      they value equally many

Actor and critic are paired by data rank: the groups of an actor come from the critic with the same
samples, and both compute the same advantages and returns from the values in them. Values are always
of the version that the iteration begins with: a critic learns only when its whole share has them.

The number of ranks changes as an actor's does: ask both groups for the same strategy,
and send the next iteration to the ranks that the reports of both name.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import LanguageTrainReport, Sample, SampleGroup
from rlinf_async.workers.actor.iteration import Iteration
from rlinf_async.workers.actor.language import LanguageBatches, LanguageTrainingWorker
from rlinf_async.workers.base import BuildError
from rlinf_async.workers.inference import with_values


class LanguageCritic(LanguageTrainingWorker):
    """One rank of the critic group, over any `LanguageTrainer`.

    `FSDPCritic` and `MegatronCritic` are this one with a backend of their own.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration, the actor's own.
        actor_ranks: data ranks of the actor group, which are paired with those of the critic.
        backend: registered name of the backend; the class's own when left out.
        resume: folder of the checkpoint to go on from.
        max_staleness: the actor's.

    Raises:
        BuildError: critics have another number of data ranks than actors.
    """

    backend = "fsdp_critic"

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        actor_ranks: int = 1,
        backend: str | None = None,
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        together = self.ranks_of_a_model(trainer)
        if actor_ranks * together != self.world_size:
            raise BuildError(
                f"{self.name} is one of {self.world_size} critics, but there are {actor_ranks} "
                "actors: each actor is paired with the critic of its rank, so launch "
                + ("as many" if together == 1 else f"{actor_ranks * together}")
            )
        super().__init__(
            trainer, batches, backend=backend, resume=resume, max_staleness=max_staleness
        )

    @staticmethod
    def ranks_of_a_model(trainer: Any) -> int:
        """Return how many critics hold one model together, by the trainer's configuration."""
        return 1

    async def value_and_train(
        self, input_channel: Receiver[SampleGroup], output_channel: Sender[SampleGroup]
    ) -> LanguageTrainReport:
        """Add values to this rank's share of one iteration, then learn from it.

        Each group goes on to the actor of this rank as soon as it has its values. An idle rank
        takes none. Raises what `run_training` does.
        """

        async def train(iteration: Iteration) -> LanguageTrainReport:
            return await self._value_and_train(iteration, input_channel, output_channel)

        return await self.trained(train)

    async def _value_and_train(
        self,
        iteration: Iteration,
        input_channel: Receiver[SampleGroup],
        output_channel: Sender[SampleGroup],
    ) -> LanguageTrainReport:
        await self.onload()
        began = asyncio.get_running_loop().time()
        valued: list[SampleGroup] = []
        missing = self._sizes.total_batch_size
        at = self._trainer.data_rank
        while missing > 0:
            groups = await self._next_groups(input_channel, missing) if at.is_io else []
            samples = [sample for group in groups for sample in group.samples]
            with self.span("values", samples=len(samples)):
                found = await self.compute(self._trainer.values, samples)
            if at.is_io:
                for sample, value in zip(samples, found, strict=True):
                    sample.value = value
            for group in groups:
                await output_channel.put(group, key=at.rank)
            valued += groups
            missing -= len(found)
        iteration.arrived.wait_seconds = asyncio.get_running_loop().time() - began
        return await iteration.train(valued)

    async def _next_groups(self, channel: Receiver[SampleGroup], missing: int) -> list[SampleGroup]:
        """Receive the groups that are ready, up to the missing samples.

        The ranks of a sharded model compute together, one group at a time.
        """
        most = 1 if self.active_world_size > 1 else -(-missing // self._batches.group_size)
        key = self._trainer.data_rank.rank
        return await channel.get_batch(weight=most, at_least=1, key=key)

    async def run_inference(
        self, input_channel: Receiver[Sample], output_channel: Sender[Sample]
    ) -> int:
        """Add values to this rank's share of one iteration; see `pass_through`.

        Returns the number of samples, 0 on an idle rank.
        """
        if not self.active:
            return 0
        answer = partial(with_values, self._trainer)
        return await self.pass_through(input_channel, output_channel, answer)


class FSDPCritic(LanguageCritic):
    """A critic that FSDP shards; its ``trainer`` is a `LanguageTrainerConfig`."""

    backend = "fsdp_critic"


class MegatronCritic(LanguageCritic):
    """A critic that Megatron trains; its ``trainer`` is a `MegatronTrainerConfig`."""

    backend = "megatron_critic"

    @staticmethod
    def ranks_of_a_model(trainer: Any) -> int:
        """Return the number of tensor ranks times that of pipeline stages."""
        count: int = trainer.megatron.tp * trainer.megatron.pp
        return count
