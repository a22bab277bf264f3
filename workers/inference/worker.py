"""`InferenceWorker`: adds the actor's log-probs to samples on their way to the reward workers.

::

    Sample ---lease---> [ whatever is ready, up to max_samples ] ---forward---> Sample
                                 ^
    WeightUpdate ----------------+  loaded between two batches

                waits for                                   unblocked by
    run         a sample                                    rollout workers
                weights as new as a sample's newest token   the actor
                room for the sample                         reward workers

Each rank has the whole model and takes samples when it is free, which balances the work. A sample
is leased until it was sent on: if this worker dies before, another one gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_async.backends.base import made_by
from rlinf_async.channels import LatestReceiver, Receiver, Sender
from rlinf_async.messages.language import Sample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker
from rlinf_async.workers.inference.answers import with_log_probs
from rlinf_async.workers.rollout.following import FollowedWeights
from rlinf_async.workers.tasks import task_group

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of an inference worker."""

    max_samples: int = 32
    """largest number of samples in a batch, which takes those that are ready"""
    previous: bool = True
    """whether to compute log-probs under the newest weights, at least as new as the sample's newest
    token. On-policy these are the weights that training begins with; with a staleness of k they are
    up to k versions older"""
    reference: bool = False
    """whether to compute log-probs under the first weights, which the trainer keeps (``reference =
    true``)"""

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}; it must be at least 1")
        if not (self.previous or self.reference):
            raise ValueError("previous and reference are both off: there is nothing to compute")


class InferenceReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `InferenceWorker.run`."""

    samples: int = 0
    tokens: int = 0
    """tokens of prompts and responses"""
    batches: int = 0
    weight_updates: int = 0
    version: int = -1
    """version of the weights at the end; -1 where none came"""


class InferenceWorker(Worker):
    """One rank of the inference group.

    Args:
        trainer: configuration of the actor's trainer backend, as its own Struct.
        config: how this worker computes.
        backend: the trainer's registered name.
    """

    _trainer: LanguageTrainer = made_by("setup()")

    def __init__(
        self, trainer: Any, config: InferenceConfig | None = None, *, backend: str = "fsdp"
    ) -> None:
        self.config = config or InferenceConfig()
        self._trainer_config = trainer
        self._backend_name = backend

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        from rlinf_async.backends.registry import LANGUAGE_TRAINERS, slow_imports

        return slow_imports(LANGUAGE_TRAINERS, arguments.get("backend"))

    async def setup(self) -> None:
        """Build the model; the actor's weights come with the first update."""
        self._trainer = await self.compute(self.make_trainer)
        self._version = -1
        self._weights = FollowedWeights(lambda: self._version, askers="inference workers")

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        from rlinf_async.backends.registry import load_language_trainer

        return load_language_trainer(self._backend_name)(self._trainer_config, 1, 0)

    async def run(
        self,
        samples: Receiver[Sample],
        done: Sender[Sample],
        weights: LatestReceiver[WeightUpdate],
    ) -> InferenceReport:
        """Compute for samples until there are no more.

        Raises:
            WeightsError: an update was damaged or does not fit the model.
            WeightsEnded: a sample has tokens of newer weights than will ever come.
        """
        report = InferenceReport()
        loads = self._weights.loads
        async with task_group() as group:
            following = group.create_task(self._weights.follow(weights, self._load))
            async for lease in samples.leases(weight=self.config.max_samples, at_least=1):
                async with lease as batch:
                    await self._weights.reach(_newest(batch))
                    for sample in await self._answer(list(batch)):
                        await done.put(sample)
                report.samples += len(batch)
                report.tokens += sum(_tokens(sample) for sample in batch)
                report.batches += 1
            following.cancel()
        report.weight_updates = self._weights.loads - loads
        report.version = self._version
        return report

    async def _load(self, update: WeightUpdate) -> None:
        with self.span("load weights", version=update.version):
            await self.compute(self._trainer.load, update)
        self._version = update.version
        self._weights.loaded()

    async def _answer(self, samples: list[Sample]) -> list[Sample]:
        config = self.config
        with self.span("inference", samples=len(samples)):
            return await self.compute(
                with_log_probs,
                self._trainer,
                samples,
                reference=config.reference,
                previous=config.previous,
            )


def _newest(samples: Sequence[Sample]) -> int:
    """The version of the newest weights that generated a token of them."""
    return max((int(one.generated.version.max(initial=0)) for one in samples), default=0)


def _tokens(sample: Sample) -> int:
    return len(sample.request.prompt.token_ids) + len(sample.generated.token_ids)
