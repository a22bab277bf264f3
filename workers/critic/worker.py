"""`FSDPCritic`: gives samples their values, and learns from what became of them.

::

    Sample --> [ values ] --> Sample        on its way to the reward workers, one by one
    SampleGroup --by rank--> [ returns -> micro-batches -> steps ] --> report

The collector sends every group to the actor's rank and to the critic's rank of the same number;
both find the same advantages and returns from the values in the samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import Sample
from rlinf_async.workers.actor.config import LanguageBatches
from rlinf_async.workers.actor.language_training import LanguageTrainingWorker
from rlinf_async.workers.errors import BuildError
from rlinf_async.workers.inference.answers import with_values


class FSDPCritic(LanguageTrainingWorker):
    """One rank of the critic group.

    Args:
        trainer: configuration of the trainer backend, as its own Struct.
        batches: sizes of an iteration, the actor's own.
        actor_ranks: of the actor group, each of which is paired with a rank here.
        backend: its registered name.
        resume: folder of the checkpoint to go on from.
        max_staleness: as the actor's.

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

    async def run_inference(
        self, input_channel: Receiver[Sample], output_channel: Sender[Sample]
    ) -> int:
        """Add values to this rank's share of one iteration; see `pass_through`."""
        answer = partial(with_values, self._trainer)
        return await self.pass_through(input_channel, output_channel, answer)
