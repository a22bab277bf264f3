"""`GroupCritic`: our `LanguageCritic` as one rank of a training group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlinf_async.backends.megatron.config import MegatronTrainerConfig
from rlinf_async.channels import Channel, Receiver
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup, TrainingSample
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.critics import CriticStep, from_peer
from rlinf_async.runtime.ray.training.ranks import PeerFailed
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
        self, groups: Sequence[SampleGroup], *, rollout_id: int, paired: CriticStep | None = None
    ) -> LanguageTrainReport:
        """Value this rank's share of one rollout, and train on it.

        Args:
            groups: the share.
            rollout_id: number of the rollout.
            paired: the step in which the actor of this rank trains the same rollout; None while
                the critic trains alone.

        Raises:
            PeerFailed: that actor failed before it gave what values are computed from, or is lost.
        """
        failed: Exception | None = None
        if paired is not None and paired.prepared is not None and self.data_rank.is_io:
            doing = f"{self.name} cannot train rollout {rollout_id}"
            try:
                prepared = self._prepared(paired.prepared, len(groups))
                groups = await from_peer(paired.peer, doing, prepared)
            except PeerFailed as error:  # the other ranks must not train either
                failed = error
        samples = [sample for group in groups for sample in group.samples]
        await self.compute(self._agree_ready, samples, failed)
        valued = Channel(SampleGroup, name=f"{self.name} valued", capacity=max(len(groups), 1))
        with valued.receiver:
            if paired is None or not self.data_rank.is_io:  # nobody takes them
                return await self.value_and_train(self._fed(groups).receiver, valued.sender)
            passing = asyncio.create_task(
                paired.pass_on(len(groups), valued.receiver, self.data_rank.rank)
            )
            try:
                report = await self.value_and_train(self._fed(groups).receiver, valued.sender)
                await passing
                return report
            finally:
                passing.cancel()

    async def _prepared(self, actor: Receiver[SampleGroup], groups: int) -> list[SampleGroup]:
        """Take the share from the actor, which has added reference log-probs."""
        return [await actor.get() for _ in range(groups)]

    def _agree_ready(self, samples: Sequence[TrainingSample], failed: Exception | None) -> None:
        """Check the samples, of those who read them, for all ranks or for none. Collective.

        Args:
            failed: what this rank failed with before.
        """
        try:
            if self.data_rank.is_io and failed is None:
                self._check_ready(samples, reference=self.args.kl_coef > 0.0, values=False)
        except ValueError as error:
            failed = error
        self.vote(failed)
