"""`GroupCritic`: our `FSDPCritic` as one rank of a training group."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.settings import backend, batches, trainer_config
from rlinf_async.runtime.ray.training.worker import GroupRank
from rlinf_async.workers.critic import FSDPCritic


class GroupCritic(GroupRank, FSDPCritic):
    """One rank of a critic."""

    def __init__(self, args: TrainArgs, device: str) -> None:
        self.args, self.torch_device = args, device
        config = trainer_config(args, critic=True, reference=False, device=device)
        # No limit of staleness: rollouts that a critic trains alone make no version of the actor.
        super().__init__(
            config, batches(args), actor_ranks=self.world_size, backend=backend(args, critic=True)
        )

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
        if prepared is not None:
            groups = [await prepared.get(key=self.rank) for _ in groups]
        samples = [sample for group in groups for sample in group.samples]
        self._check_ready(samples, reference=self.args.kl_coef > 0.0, values=False)
        channel = self._fed(groups)
        if values is not None:
            return await self.value_and_train(channel.receiver, values)
        alone = Channel(SampleGroup, name=f"{self.name} alone", capacity=len(groups))
        with alone.receiver:  # nobody takes them
            return await self.value_and_train(channel.receiver, alone.sender)
