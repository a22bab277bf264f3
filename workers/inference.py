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

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlinf_async.backends.base import made_by
from rlinf_async.backends.language import require_finite
from rlinf_async.backends.parts import DEFAULT_LANGUAGE_TRAINER, language_trainers
from rlinf_async.channels import EndOfChannel, LatestReceiver, Receiver, Sender
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Branch, Kept, Mask, Sample, Tokens, TrainingSample
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.rollout.policy import FollowedWeights

if TYPE_CHECKING:
    from rlinf_async.backends.language import LanguageTrainer


def with_log_probs(
    trainer: LanguageTrainer, samples: list[Sample], *, reference: bool, previous: bool = True
) -> list[Sample]:
    """The samples with previous and, where asked for, reference log-probs.

    A rank that does not read computes those of the rank that does, and returns none.

    Raises:
        ModelOutputError: one is not finite.
    """
    bare = [as_bare(sample) for sample in samples]
    done = samples
    if previous:
        whose = f"the actor's forward pass under weights version {trainer.version}"
        done = _with_field(done, "prev_log_prob", _finite(bare, trainer.log_probs(bare), whose))
    if reference:
        found = trainer.log_probs(bare, reference=True)
        done = _with_field(
            done, "ref_log_prob", _finite(bare, found, "the reference's forward pass")
        )
    return done


def _finite(bare: list[TrainingSample], found: list[Floats], whose: str) -> list[Floats]:
    for one, log_prob in zip(bare, found, strict=False):
        require_finite(log_prob, one.response_ids, whose, f"sample {one.group}/{one.index}")
    return found


def with_values(trainer: LanguageTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with a critic's values; none on a rank that does not read."""
    return _with_field(samples, "value", trainer.values([as_bare(sample) for sample in samples]))


def _with_field(samples: list[Sample], field: str, found: list[Floats]) -> list[Sample]:
    if not samples:
        return []
    return [
        msgspec.structs.replace(sample, **{field: one})
        for sample, one in zip(samples, found, strict=True)
    ]


def as_bare(sample: Sample) -> TrainingSample:
    """A sample before its score, as a trainer's forward pass takes it."""
    request = sample.request
    return bare_sample(
        request.prompt.token_ids,
        sample.generated.token_ids,
        temperature=request.sampling.temperature or 1.0,
        kept=sample.generated.kept,
        drawn=sample.generated.drawn,
        branches=sample.branches,
        group=request.group,
        index=request.index,
    )


def bare_sample(
    prompt_ids: Tokens,
    response_ids: Tokens,
    *,
    temperature: float = 1.0,
    kept: Kept | None = None,
    drawn: Mask | None = None,
    branches: tuple[Branch, ...] = (),
    group: int = 0,
    index: int = 0,
) -> TrainingSample:
    """A sample of tokens only, with an empty loss mask."""
    size = len(response_ids)
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=np.zeros(size, np.bool_),
        log_prob=np.zeros(size, np.float32),
        version=np.zeros(size, np.int32),
        temperature=temperature,
        kept=kept,
        reward=math.nan,
        scored=False,
        drawn=drawn,
        branches=branches,
    )


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
        check_bounds(self, "max_samples", least=1)
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

    stateless = True

    _trainer: LanguageTrainer = made_by("setup()")

    def __init__(
        self,
        trainer: Any,
        config: InferenceConfig | None = None,
        *,
        backend: str = DEFAULT_LANGUAGE_TRAINER,
    ) -> None:
        self.config = config or InferenceConfig()
        self._trainer_config = trainer
        self._backend_name = backend

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        name = arguments.get("backend", DEFAULT_LANGUAGE_TRAINER)
        return language_trainers.load(name).slow_imports

    async def setup(self) -> None:
        """Build the model; the actor's weights come with the first update."""
        self._trainer = await self.compute(self.make_trainer)
        self._version = -1
        self._weights = FollowedWeights(lambda: self._version, askers="inference workers")

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        return language_trainers.load(self._backend_name).make(self._trainer_config, 1, 0)

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
        self.meter.serves("inference", self.config.max_samples)
        loads = self._weights.loads
        async with task_group() as group:
            following = group.create_task(self._weights.follow(weights, self._load))
            with contextlib.suppress(EndOfChannel):
                while True:
                    async with samples.lease(weight=self.config.max_samples, at_least=1) as batch:
                        await self._weights.reach(_newest(batch))
                        for sample in await self._answer(list(batch)):
                            await done.put(sample)
                    report.samples += len(batch)
                    report.tokens += sum(sample.tokens for sample in batch)
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
        with (
            self.span("inference", samples=len(samples)),
            self.meter.batch("inference", len(samples)),
        ):
            return await self.compute(
                with_log_probs,
                self._trainer,
                samples,
                reference=config.reference,
                previous=config.previous,
            )


def _newest(samples: Sequence[Sample]) -> int:
    """Return the newest version of the weights that generated a token of the samples."""
    return max((int(one.generated.version.max(initial=0)) for one in samples), default=0)
