"""`InferenceWorker`: adds log-probs to samples on their way to the reward workers: by the actor,
by the reference, which are the actor's first weights, and by a teacher, which is another model, or
an earlier version of the actor's.

::

    Sample ---lease---> [ whatever is ready, up to max_samples ] ---forward---> Sample
                                 ^
    WeightUpdate ----------------+  loaded between two batches

                waits for                                   unblocked by
    run         a sample                                    rollout workers
                weights as new as a sample's newest token,  the actor
                but for a teacher alone
                room for the sample                         reward workers

Each rank has the whole models and takes samples when it is free, which balances the work. A sample
is leased until it was sent on: if this worker dies before, another one gets it.

A worker that computes nothing of the actor's has no model of the actor, and waits for no weights:
those of a teacher are in a folder. One that is an earlier version of the actor's is chosen by the
sample alone (`EarlierVersions`), so whichever rank is asked, and when, the answer is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from rlinf_async.backends.base import made_by
from rlinf_async.backends.language import TellsDistributions, require_finite
from rlinf_async.backends.parts import DEFAULT_LANGUAGE_TRAINER, Learner, language_trainers
from rlinf_async.channels import EndOfChannel, LatestReceiver, Receiver, Sender
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    Biases,
    Branch,
    Example,
    Images,
    Kept,
    Mask,
    Routes,
    Sample,
    TeacherLogProbs,
    Tokens,
    TrainingSample,
)
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


class TeacherQuestions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a teacher is asked about each token."""

    top_k: int | Literal["all"] = 0
    """number of most likely tokens whose log-probs it tells beside that of the drawn one; 0: none
    beside it"""
    vocabulary: int
    """tokens of the policy's vocabulary: the teacher may have more, of which none is asked for"""

    def __post_init__(self) -> None:
        check_bounds(self, "vocabulary", least=1)
        if self.top_k != "all":
            check_bounds(self, "top_k", least=0)


class EarlierVersions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of the policy that are its teachers: every so many-th, each in a folder of its own.

    A sample is compared with the newest of them that is not newer than its newest token. So its
    teacher depends on the sample alone, and is there before the sample is: a version is written
    before it is published.
    """

    folder: str
    """folder of the versions"""
    every: int
    """versions from one teacher to the next"""
    max_staleness: int = 0
    """versions that a sample's newest token may be older than the newest of another sample's"""

    def __post_init__(self) -> None:
        check_bounds(self, "every", least=1)
        check_bounds(self, "max_staleness", least=0)

    def teacher_of(self, version: int) -> int:
        """Return the version that teaches samples whose newest token is of this one."""
        return max(0, version) // self.every * self.every

    def oldest_needed(self, version: int) -> int:
        """Return the oldest version that may still teach a sample, once there are samples of this
        one."""
        return self.teacher_of(version - self.max_staleness)

    def path(self, version: int) -> Path:
        """Return the folder of a teacher."""
        return Path(self.folder) / f"version-{version:06d}"


def ask_teacher(
    teacher: LanguageTrainer, bare: Sequence[TrainingSample], asked: TeacherQuestions
) -> list[TeacherLogProbs]:
    """Return what a teacher holds of samples.

    Raises:
        ModelOutputError: a log-prob of a token of the response is not finite.
        TypeError: the trainer tells nothing of other tokens, and is asked for it.
    """
    if asked.top_k == 0:
        found = [_of_drawn(one) for one in teacher.log_probs(bare)]
    elif isinstance(teacher, TellsDistributions):
        top_k = None if asked.top_k == "all" else asked.top_k
        found = teacher.distributions(bare, top_k=top_k, vocabulary=asked.vocabulary)
    else:
        raise TypeError(
            f"a {type(teacher).__name__} tells log-probs of the drawn tokens alone: set "
            "teacher.top_k to 0"
        )
    _finite(list(bare), [one.drawn for one in found], "the teacher's forward pass")
    return found


def _of_drawn(log_prob: Floats) -> TeacherLogProbs:
    rows = len(log_prob)
    return TeacherLogProbs(log_prob, np.zeros((rows, 0), np.float32), np.zeros((rows, 0), np.uint8))


def with_teacher(
    teacher: LanguageTrainer,
    samples: list[Sample],
    asked: TeacherQuestions,
    version: int | None = None,
) -> list[Sample]:
    """The samples with what a teacher holds of them; those of evaluations as they are.

    ``version``: version of the policy that the teacher is; None: it is another model.
    """
    learnt = [one for one in samples if not one.request.evaluation]
    told = ask_teacher(teacher, [as_bare(one) for one in learnt], asked) if learnt else []
    if version is not None:
        told = [msgspec.structs.replace(one, version=version) for one in told]
    found = iter(told)
    return [
        one if one.request.evaluation else msgspec.structs.replace(one, teacher=next(found))
        for one in samples
    ]


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
        logit_bias=request.sampling.logit_bias,
        routes=sample.generated.routes,
        drawn=sample.generated.drawn,
        branches=sample.branches,
        images=request.prompt.images,
        group=request.group,
        index=request.index,
    )


def bare_sample(
    prompt_ids: Tokens,
    response_ids: Tokens,
    *,
    temperature: float = 1.0,
    kept: Kept | None = None,
    logit_bias: Biases = (),
    routes: Routes | None = None,
    drawn: Mask | None = None,
    branches: tuple[Branch, ...] = (),
    images: Images = (),
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
        logit_bias=logit_bias,
        routes=routes,
        reward=math.nan,
        scored=False,
        drawn=drawn,
        branches=branches,
        images=images,
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
    teacher: TeacherQuestions | None = None
    """what to ask a teacher; None: there is none"""
    earlier: EarlierVersions | None = None
    """versions of the policy that are the teacher; None: it is another model"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_samples", least=1)
        if self.earlier and not self.teacher:
            raise ValueError("there are versions to be the teacher, and no questions: set teacher")
        if not (self.of_actor or self.teacher):
            raise ValueError(
                "previous and reference are both off, and there is no teacher: there is nothing to "
                "compute"
            )

    @property
    def of_actor(self) -> bool:
        """Whether anything is computed by the actor's model."""
        return self.previous or self.reference


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
        teacher: the same of a teacher, where the configuration has questions for one; of
            ``earlier`` versions the `Learner` that it is made of, but for its folder.
        backend: the trainer's registered name.
    """

    stateless = True

    _trainer: LanguageTrainer = made_by("setup()")
    _teacher: LanguageTrainer = made_by("setup()")

    def __init__(
        self,
        trainer: Any,
        config: InferenceConfig | None = None,
        teacher: Any = None,
        *,
        backend: str = DEFAULT_LANGUAGE_TRAINER,
    ) -> None:
        self.config = config or InferenceConfig()
        self._trainer_config = trainer
        self._teacher_config = teacher
        self._backend_name = backend

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        name = arguments.get("backend", DEFAULT_LANGUAGE_TRAINER)
        return language_trainers.load(name).slow_imports

    async def setup(self) -> None:
        """Build the models; the actor's weights come with the first update."""
        if self.config.of_actor:
            self._trainer = await self.compute(self.make_trainer)
        if self.config.teacher is not None and self.config.earlier is None:
            self._teacher = await self.compute(self.make_teacher)
        self._earlier: dict[int, LanguageTrainer] = {}
        self._version = -1
        self._weights = FollowedWeights(lambda: self._version, askers="inference workers")

    def make_trainer(self) -> LanguageTrainer:
        """Build the trainer. Runs in the compute thread; override it to bring your own."""
        return language_trainers.load(self._backend_name).make(self._trainer_config, 1, 0)

    def make_teacher(self) -> LanguageTrainer:
        """Build the teacher. Runs in the compute thread; override it to bring your own."""
        return language_trainers.load(self._backend_name).make(self._teacher_config, 1, 0)

    def make_earlier(self, folder: Path) -> LanguageTrainer:
        """Build the teacher that is the version in this folder. Runs in the compute thread."""
        learner: Learner = self._teacher_config
        model = msgspec.structs.replace(learner.model, path=str(folder))
        part = language_trainers.load(self._backend_name)
        return part.make(part.config(msgspec.structs.replace(learner, model=model)), 1, 0)

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
            following = None
            if self.config.of_actor:
                following = group.create_task(self._weights.follow(weights, self._load))
            with contextlib.suppress(EndOfChannel):
                while True:
                    async with samples.lease(weight=self.config.max_samples, at_least=1) as batch:
                        if following is not None:
                            await self._weights.reach(_newest(batch))
                        for sample in await self._answer(list(batch)):
                            await done.put(sample)
                    report.samples += len(batch)
                    report.tokens += sum(sample.tokens for sample in batch)
                    report.batches += 1
            if following is not None:
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
        with (
            self.span("inference", samples=len(samples)),
            self.meter.batch("inference", len(samples)),
        ):
            return await self.compute(self._computed, samples)

    def _computed(self, samples: list[Sample]) -> list[Sample]:
        """Compute all that is asked for, in the compute thread."""
        config, done = self.config, samples
        if config.of_actor:
            done = with_log_probs(
                self._trainer, done, reference=config.reference, previous=config.previous
            )
        if config.teacher is None:
            return done
        if config.earlier is None:
            return with_teacher(self._teacher, done, config.teacher)
        return self._with_earlier(done, config.teacher, config.earlier)

    def _with_earlier(
        self, samples: list[Sample], asked: TeacherQuestions, earlier: EarlierVersions
    ) -> list[Sample]:
        """Ask about each sample the version that teaches it.

        A sample whose teacher is gone stays as it is: it was trained, and has come a second time.
        """
        teachers = [earlier.teacher_of(_newest([one])) for one in samples]
        found = list(samples)
        for version in sorted(set(teachers)):
            at = [number for number, one in enumerate(teachers) if one == version]
            its = [samples[number] for number in at]
            if all(one.request.evaluation for one in its):
                continue
            self._drop_earlier(earlier.oldest_needed(max(_newest(its), *self._earlier, 0)))
            teacher = self._earlier.get(version) or self._load_earlier(earlier, version)
            if teacher is not None:
                told = with_teacher(teacher, its, asked, version)
                for number, one in zip(at, told, strict=True):
                    found[number] = one
        return found

    def _load_earlier(self, earlier: EarlierVersions, version: int) -> LanguageTrainer | None:
        """Return a version of the policy; None where it was removed, as later ones are in use.

        Raises:
            FileNotFoundError: there is none at all.
        """
        folder = earlier.path(version)
        if not folder.is_dir():
            if any(one.name > folder.name for one in folder.parent.glob("version-*")):
                return None
            raise FileNotFoundError(
                f"version {version} of the policy, which is its teacher, is not in {folder}: are "
                "all hosts on a disk that has the run's folder?"
            )
        with self.span("load teacher", version=version):
            self._earlier[version] = self.make_earlier(folder)
        return self._earlier[version]

    def _drop_earlier(self, oldest: int) -> None:
        """Free the versions before this one."""
        for version in [one for one in self._earlier if one < oldest]:
            del self._earlier[version]

    async def ask_about(self, examples: list[Example]) -> list[TeacherLogProbs]:
        """Return what the teacher holds of this rank's share of the answers, at temperature 1:
        every so many-th example."""
        asked = self.config.teacher
        if asked is None:
            raise ValueError("this inference worker has no teacher to ask")
        share = examples[self.rank :: self.world_size]
        with self.span("inference", samples=len(share)):
            samples = [one.sample(at) for at, one in enumerate(share)]
            return await self.compute(ask_teacher, self._teacher, samples, asked)


def _newest(samples: Sequence[Sample]) -> int:
    """Return the newest version of the weights that generated a token of the samples."""
    return max((int(one.generated.version.max(initial=0)) for one in samples), default=0)
