"""`RescalingLanguageWorker`: a rank of a language model whose number of training ranks changes.

::

    strategy is asked for --> [ iteration: train, or sit it out ] --> all ranks change --> report

What it waits for: see `LanguageTrainingWorker` and `Rescaling`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rlinf_async.backends.base import Rescalable
from rlinf_async.channels import Receiver
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.parallel import check_batch
from rlinf_async.workers.actor.language_training import LanguageTrainingWorker
from rlinf_async.workers.actor.rescaling import Rescaling, as_rescalable


class RescalingLanguageWorker(Rescaling, LanguageTrainingWorker):
    """One rank of an actor or critic group; see `TrainerWorker` for what it is made with."""

    async def run_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Collect this rank's whole share of one iteration, then train on it.

        The model is onloaded only after the data is there; an idle rank takes none. Raises:

            TrainingDiverged: the loss was not finite, or no step's gradient was.
            RuntimeError: a token is older than ``max_staleness``.
            BatchingError: groups do not make up the share.
        """
        return await self.trained(super().run_training, input_channel)

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Train on one iteration while it arrives: micro-batch after micro-batch.

        The compute thread waits for each next one, so nothing else is computed here meanwhile: ask
        an inference worker for log-probs. Raises what `run_training` does.
        """
        return await self.trained(super().run_training_pipeline, input_channel)

    async def skip_training(self, input_channel: Receiver[SampleGroup]) -> LanguageTrainReport:
        """Take this rank's share of one iteration and count the version up, without training.

        For an actor whose critic is still warming up.
        """
        return await self.trained(super().skip_training, input_channel)

    async def trained(
        self,
        train: Callable[[Receiver[SampleGroup]], Awaitable[LanguageTrainReport]],
        input_channel: Receiver[SampleGroup],
    ) -> LanguageTrainReport:
        """Train one iteration, or sit it out; then change to the strategies that are due."""
        async with self.training():
            if self.active:
                report = await train(input_channel)
            else:
                tally = self._tally()
                await self.compute(self.rescalable().sit_out)
                report = self._report(tally, [], seconds=0.0)
            await self.scheduler_scale_sync()
            report.ranks = self.active_world_size
            return report

    def rescalable(self) -> Rescalable:
        """The trainer; raises `StrategyError` where its backend cannot change its ranks."""
        return as_rescalable(self._trainer, self._backend_name)

    def check_share(self, dp: int) -> None:
        """Raise `ValueError` unless ``dp`` ranks can share a global batch in whole groups."""
        shares = self._batch_sizes
        check_batch(shares.samples // shares.optimizer_steps, dp, group_size=shares.group_size)
        shares.of_rank(dp)

    def take_share(self, dp: int) -> None:
        """Use the batch sizes of one of ``dp`` ranks."""
        self._sizes = self._batch_sizes.of_rank(dp)

    async def make_ready(self) -> None:
        """Take the model back to the device."""
        await self.onload()
