"""`GroupCritic`: our `LanguageCritic` as one rank of a training group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_async.backends.megatron.config import MegatronTrainerConfig
from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.settings import backend, batches, trainer_config
from rlinf_async.runtime.ray.training.worker import GroupRank
from rlinf_async.workers.critic import LanguageCritic


class GroupCritic(GroupRank, LanguageCritic):
    """One rank of a critic. Of the ranks of one model, the one that reads values for the others."""

    def __init__(self, args: TrainArgs, device: str) -> None:
        self.args, self.torch_device = args, device
        config = trainer_config(args, critic=True, reference=False, device=device)
        # No limit of staleness: rollouts that a critic trains alone make no version of the actor.
        super().__init__(
            config,
            batches(args),
            actor_ranks=args.data_ranks(self.world_size),
            backend=backend(args, critic=True),
        )

    @staticmethod
    def ranks_of_a_model(trainer: Any) -> int:
        """Return how many ranks hold one model together."""
        if isinstance(trainer, MegatronTrainerConfig):
            return trainer.megatron.tp * trainer.megatron.pp
        return 1

    async def train_rollout(
        self,
        groups: Sequence[SampleGroup],
        values: Sender[SampleGroup] | None = None,
        prepared: Receiver[SampleGroup] | None = None,
    ) -> LanguageTrainReport:
        """Value this rank's share of one rollout, and train on it.

        Args:
            groups: the share.
            values: to the actor of this rank; None while the critic trains alone.
            prepared: the same groups with reference log-probs, from that actor, if they are needed.
        """
        if prepared is not None and self.data_rank.is_io:
            groups = [await prepared.get(key=self.data_rank.rank) for _ in groups]
        samples = [sample for group in groups for sample in group.samples]
        await self.compute(self._agree_ready, samples)
        channel = self._fed(groups)
        if values is not None:
            return await self.value_and_train(channel.receiver, values)
        alone = Channel(SampleGroup, name=f"{self.name} alone", capacity=len(groups))
        with alone.receiver:  # nobody takes them
            return await self.value_and_train(channel.receiver, alone.sender)

    def _agree_ready(self, samples: Sequence[TrainingSample]) -> None:
        """Check the samples, of those who read them, for all ranks or for none. Collective."""
        failed: Exception | None = None
        try:
            if self.data_rank.is_io:
                self._check_ready(samples, reference=self.args.kl_coef > 0.0, values=False)
        except ValueError as error:
            failed = error
        self.vote(failed)
