"""`FSDPCritic`: adds values to samples, and learns from their returns.

::

    SampleGroup --by rank--> [ values ] --> SampleGroup, by rank, at once: the actor of this rank
                                 |
                                 +--> [ returns -> micro-batches -> steps ] --> report

                      waits for                            unblocked by
    value_and_train   a group of its share                 the collector
                      room for the group                   the actor of its rank
                      the other ranks, group by group      they value equally many

Actor and critic are paired rank by rank: the groups of an actor come from the critic of the same
rank, and both compute the same advantages and returns from the values in them. Values are always of
the version that the iteration begins with: a critic learns only when its whole share has them.

The number of ranks changes as an actor's does: ask both groups for the same strategy,
and send the next iteration to the ranks that the reports of both name.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import LanguageTrainReport, Sample, SampleGroup
from rlinf_async.workers.actor.config import LanguageBatches
from rlinf_async.workers.actor.iteration import Iteration
from rlinf_async.workers.actor.language_worker import LanguageTrainingWorker
from rlinf_async.workers.errors import BuildError
from rlinf_async.workers.inference.answers import with_values


class FSDPCritic(LanguageTrainingWorker):
    """One rank of the critic group.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration, the actor's own.
        actor_ranks: number of ranks of the actor group, which are paired with those of the critic.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
        max_staleness: the actor's.

    Raises:
        BuildError: there are not as many critics as actors.
    """

    def __init__(
        self,
        trainer: Any,
        batches: LanguageBatches,
        *,
        actor_ranks: int = 1,
        backend: str = "fsdp_critic",
        resume: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        if actor_ranks != self.world_size:
            raise BuildError(
                f"{self.name} is one of {self.world_size} critics, but there are {actor_ranks} "
                "actors: each actor is paired with the critic of its rank, so launch as many"
            )
        super().__init__(
            trainer, batches, backend=backend, resume=resume, max_staleness=max_staleness
        )

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
        while missing > 0:
            groups = await self._next_groups(input_channel, missing)
            samples = [sample for group in groups for sample in group.samples]
            with self.span("values", samples=len(samples)):
                found = await self.compute(self._trainer.values, samples)
            for sample, value in zip(samples, found, strict=True):
                sample.value = value
            for group in groups:
                await output_channel.put(group, key=self.rank)
            valued += groups
            missing -= len(samples)
        iteration.arrived.wait_seconds = asyncio.get_running_loop().time() - began
        return await iteration.train(valued)

    async def _next_groups(self, channel: Receiver[SampleGroup], missing: int) -> list[SampleGroup]:
        """Receive the groups that are ready, up to the missing samples.

        The ranks of a sharded model compute together, one group at a time.
        """
        most = 1 if self.active_world_size > 1 else -(-missing // self._batches.group_size)
        return await channel.get_batch(weight=most, at_least=1, key=self.rank)

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
