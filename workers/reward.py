"""`RewardWorker`: every sample gets its outcome; first done, first out.

::

    Sample ---lease---> exact, numeric ------------------------------+---> ScoredSample
              |                                                      |
              +-------> a free process ---verifier, time limit-------+
              |                                                      |
              +-------> a process with room for an asynchronous one -+
    with ``reward.model``: what was scored --conversation--> its batch --weight x score, added-->
    with `Sample.others`: all of a prompt, of which a group verifier gets those without an outcome

                waits for                              unblocked by
    run         a sample; room for one more            rollout or inference; a sample that is done
    scoring     a process; its outcome, in time        another sample that is done; the verifier
    sending     room in the channel of scored ones     the collector

Invariant: a sample stays leased until its outcome was put, so a crash loses none. One that was put
just before the crash may come a second time: its name (``sample.request.name``) tells.

A sample that takes long holds up no other while a process is free. So that several workers share
the samples evenly, a worker takes no more than it has processes, and as many again for those that
wait. Those of asynchronous verifiers, which wait for somebody else, it takes beside these, as many
as its processes may have open. The samples of a prompt that are judged at once count as one; they
come as one item, and go on as one, so that a crash parts none of them from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.channels.wire.session.tls import FILE_VARIABLE, VARIABLE
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.messages.language import (
    Failed,
    JudgeUse,
    Outcome,
    Rejected,
    Request,
    Sample,
    Scored,
    ScoredSample,
)
from rlinf_async.rewards.judging import (
    INLINE,
    Answer,
    Verifier,
    judge,
    load_verifier,
    outcome_of,
)
from rlinf_async.rewards.pool import CALLS, ScoringPool
from rlinf_async.rewards.repeating import Judges, longest_pauses
from rlinf_async.workers.base import Worker, task_group

if TYPE_CHECKING:
    from rlinf_async.backends.transformers.reward_model import BatchedModel

SCORE: Final = "score"
"""name of the spans, and of the sums, of scoring"""


MOST_CALLS: Final = 10_000
"""largest setting of calls in a process"""
MOST_RETRIES: Final = 20
BY_MODEL: Final = "model"
"""name of the part of a reward that is the reward model's score (`Scored.parts`)"""
OF_MODEL: Final = ("model_weight", "model_tokens", "model_precision")
"""settings of the reward model"""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward worker."""

    processes: int = 2
    """processes, each of which scores a sample at a time; ``exact`` and ``numeric`` need none"""
    calls: int = CALLS
    """calls of asynchronous verifiers that are open in each process at a time; with a reward model,
    samples that wait for it, for each process"""
    time_limit: float = 10.0
    """longest time of one call of a verifier, in seconds"""
    retries: int = 2
    """further calls for a sample, after errors that may pass: a lost connection, a time-out that
    the verifier itself raised, `Retry`"""
    cache: int = 0
    """outcomes that a worker remembers, so that the same answer is not judged again; 0: none"""
    memory_limit_mib: int = 4096
    """memory limit of each process; 0: none"""
    environment: tuple[str, ...] = ()
    """names of environment variables that verifiers get beside a minimal set, such as the key of a
    server that they ask"""
    model: str = ""
    """folder of a reward model, a Hugging Face classifier with one label, whose score of prompt and
    answer is added to the verifier's; empty: there is none"""
    model_weight: float = 1.0
    """factor of the model's score"""
    model_tokens: int = 16_384
    """tokens of a forward pass of the model, padding included"""
    model_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the model's weights"""
    preload: tuple[str, ...] = ()
    """verifiers imported before the first sample, so that a wrong name is an error at the start"""

    def __post_init__(self) -> None:
        check_bounds(self, "processes", least=1, most=MOST_WORKERS)
        check_bounds(self, "calls", least=1, most=MOST_CALLS)
        check_bounds(self, "retries", least=0, most=MOST_RETRIES)
        check_bounds(self, "cache", "memory_limit_mib", least=0)
        check_bounds(self, "model_tokens", least=1)
        if not math.isfinite(self.model_weight) or self.model_weight == 0.0:
            raise ConfigError(
                f"{self.model_weight} is no factor of a score: give a finite number other than 0",
                path=("model_weight",),
            )
        for one in msgspec.structs.fields(self):
            if not self.model and one.name in OF_MODEL and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"it is {getattr(self, one.name)!r}, but there is no reward model: set model, "
                    "or leave it out",
                    path=(one.name,),
                )
        if secret := sorted({VARIABLE, FILE_VARIABLE} & set(self.environment)):
            raise ValueError(
                f"environment has {secret[0]}: with the cluster's secret a verifier could be a "
                "worker; leave it out"
            )
        if not 0.0 < self.time_limit < float("inf"):
            raise ValueError(
                f"time_limit is {self.time_limit}; it must be a number of seconds above 0"
            )

    @property
    def longest(self) -> float:
        """Seconds that a sample may take, with its retries."""
        return (1 + self.retries) * self.time_limit + longest_pauses(self.retries)


class RewardReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `RewardWorker.run`."""

    scored: int = 0
    rejected: int = 0
    failed: int = 0
    seconds: float = 0.0
    """time in verifiers, including waits for a process, as a sum over samples; those that are
    judged at once count as one"""
    longest: float = 0.0
    """longest time of a sample, in seconds"""
    judges: JudgeUse = msgspec.field(default_factory=JudgeUse)
    """calls of verifiers in processes"""
    last_failure: str = ""

    @property
    def samples(self) -> int:
        """The number of all samples."""
        return self.scored + self.rejected + self.failed


class RewardWorker(Worker):
    """One rank of the reward group.

    Args:
        config: how this worker scores.
        verifier: name of the verifier of every sample, whatever its record says: of one that was
            swapped while the run went on. Empty: that of the record. Answers to the prompts of an
            evaluation set are scored by the set's own, and by no reward model.
        device: device of the reward model, as torch names it.
    """

    stateless = True

    def __init__(
        self, config: RewardConfig | None = None, verifier: str = "", device: str = "cpu"
    ) -> None:
        self.config = config or RewardConfig()
        self._verifier = verifier
        self._device = device
        self._model: BatchedModel | None = None
        self._inline: dict[str, Verifier] = {}
        self._uses: dict[str, JudgeUse] = {}
        """calls for samples that are being scored, by their names"""
        self._beside = 0
        """samples of asynchronous verifiers that hold no place of another sample"""
        self._instead = 0
        """samples of asynchronous verifiers that do, as there was no room beside"""

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        config = arguments.get("config")
        return ("torch",) if config is not None and config.model else ()

    async def setup(self) -> None:
        """Load the reward model, the verifiers of ``preload`` and the one that was swapped in.

        Raises:
            ConfigError: one of them cannot be loaded.
        """
        if self.config.model:
            self._model = await self.compute(self._load_model)
        self._pool = ScoringPool(
            processes=self.config.processes,
            time_limit=self.config.time_limit,
            memory_limit_mib=self.config.memory_limit_mib,
            environment=self.config.environment,
            calls=self.config.calls,
        )
        self._judges = Judges(self._pool, retries=self.config.retries, cache=self.config.cache)
        names = (*self.config.preload, self._verifier)
        preload = [name for name in dict.fromkeys(names) if name and name not in INLINE]
        if preload:
            try:
                await self._pool.load(preload)
            except BaseException:
                await self._pool.close()
                raise

    def _load_model(self) -> BatchedModel:
        from rlinf_async.backends.transformers.reward_model import BatchedModel, RewardModel

        config = self.config
        model = RewardModel(config.model, self._device, config.model_precision, config.model_tokens)
        return BatchedModel(model, self.compute)

    async def teardown(self) -> None:
        """Kill all processes, and ask the model no more."""
        if self._model is not None:
            self._model.close()
        await self._pool.close()

    async def run(self, samples: Receiver[Sample], scored: Sender[ScoredSample]) -> RewardReport:
        """Score samples until there are no more.

        A verifier that raises, hangs, or ends its process is no error here but an outcome.

        Raises:
            NoReceivers: nobody takes scored samples any more.
        """
        report = RewardReport()
        self._beside = self._instead = 0
        self.meter.serves(SCORE, 2 * self.config.processes)
        async with task_group() as group:

            def take_another() -> None:
                group.create_task(self._score_each(samples, scored, report, take_another))

            for _ in range(2 * self.config.processes):
                take_another()
        return report

    async def score(self, sample: Sample) -> Outcome:
        """The outcome of one sample. Override it for scores that come from elsewhere."""
        name, answer = self._verifier_of(sample), Answer.of(sample)
        if name not in INLINE:
            use = self._uses.setdefault(sample.request.name, JudgeUse())
            self.meter.serves(SCORE, self._capacity(name))
            return await self._judges.judge(name, answer, use)
        if name not in self._inline:
            self._inline[name] = load_verifier(name)
            self.meter.serves(SCORE, 1)
        return judge(name, self._inline[name], answer)

    def _verifier_of(self, sample: Sample) -> str:
        return self._swapped(sample) or sample.request.prompt.verifier

    def _swapped(self, sample: Sample) -> str:
        """The verifier that took the place of the sample's; that of a set stays its own."""
        return "" if sample.request.evaluation_set else self._verifier

    def _waits(self, verifier: str) -> bool:
        """Whether samples of this verifier wait for somebody else, or for a batch of the model."""
        return verifier in self._pool.asynchronous or self._model is not None

    def _capacity(self, verifier: str) -> int:
        """The number of samples that this verifier can judge at a time."""
        waits = self._waits(verifier)
        return self.config.processes * (self.config.calls if waits else 1)

    async def _score_each(
        self,
        samples: Receiver[Sample],
        scored: Sender[ScoredSample],
        report: RewardReport,
        take_another: Callable[[], None],
    ) -> None:
        """Score one sample after the other. Several tasks do so at a time; one with a sample of an
        asynchronous verifier lets another task take its place, and scores that sample only."""
        await asyncio.sleep(0)  # an eager task would begin within the one whose place it takes
        with contextlib.suppress(EndOfChannel):
            while True:
                async with samples.lease() as [sample]:
                    waits = self._waits(self._verifier_of(sample))
                    if waits:
                        self._set_beside(sample, take_another)
                    await scored.put(await self._scored(sample, report))
                if waits and not self._goes_on():
                    return

    def _set_beside(self, sample: Sample, take_another: Callable[[], None]) -> None:
        """Let another task take a sample meanwhile, if there is room for one more beside."""
        if self._beside < self._capacity(self._verifier_of(sample)):
            self._beside += 1
            take_another()
        else:
            self._instead += 1

    def _goes_on(self) -> bool:
        """Whether the task whose sample of an asynchronous verifier is done takes another: in the
        place of one that found no room beside, whose sample now is one of those."""
        if self._instead:
            self._instead -= 1
            return True
        self._beside -= 1
        return False

    async def _scored(self, sample: Sample, report: RewardReport) -> ScoredSample:
        """One sample, or all samples of a prompt, with their outcomes, which are counted."""
        clock = asyncio.get_running_loop().time
        started = clock()
        samples = sample.apart()
        outcomes = [one.outcome for one in samples]  # of episodes that score themselves, or failed
        try:
            if not all(isinstance(one, Failed) for one in outcomes):
                with contextlib.ExitStack() as spans:
                    for one in samples:
                        spans.enter_context(self.span(SCORE, **_labels(one)))
                    outcomes = await self._outcomes(samples)
        finally:  # one that is cancelled is counted anew when it comes again
            use = self._uses.pop(sample.request.name, None)
        seconds = clock() - started
        scored = [
            ScoredSample(
                sample=one,
                outcome=outcome,
                seconds=seconds,
                verifier="" if one.outcome else self._swapped(one),
            )
            for one, outcome in zip(samples, outcomes, strict=True)
            if outcome is not None
        ]
        _count(report, scored, seconds, use)
        if use is not None and self._tells(use, self._verifier_of(sample)):
            scored[0].judge = use
        scored[0].others = tuple(scored[1:])
        return scored[0]

    async def _outcomes(self, samples: list[Sample]) -> list[Outcome | None]:
        """The outcomes of the samples of one prompt, or of a single one."""
        left = [one for one in samples if one.outcome is None]
        if not left:
            return [one.outcome for one in samples]
        if self._verifier_of(left[0]) in self._pool.of_groups:
            found = iter(await self._judged_at_once(left, whole=len(samples)))
        else:
            found = iter([await self.score(one) for one in left])
        outcomes = [one.outcome or next(found) for one in samples]
        if self._model is None or samples[0].request.evaluation_set:
            return list(outcomes)
        scored = zip(samples, outcomes, strict=True)
        return await asyncio.gather(*(self._with_model(one, outcome) for one, outcome in scored))

    async def _with_model(self, sample: Sample, outcome: Outcome) -> Outcome:
        """An outcome with the score of the reward model added to it."""
        if self._model is None or sample.outcome is not None or not isinstance(outcome, Scored):
            return outcome
        name, prompt = self.config.model, sample.request.prompt
        if not prompt.messages:
            return Failed(
                error=f"prompt {prompt.index} was admitted before there was a reward model: its "
                "messages were not kept"
            )
        score = await self._model.score(prompt.messages, sample.text)
        if isinstance(score, str):
            return Failed(error=f"prompt {prompt.index}: reward model {name!r}: {score}")
        judged = outcome_of(name, score, "reward model")
        if not isinstance(judged, Scored):
            return judged
        total = outcome.reward + self.config.model_weight * score
        parts = {**outcome.parts, "verifier": outcome.reward, BY_MODEL: score}
        return outcome_of(
            name, Scored(reward=total, parts=parts, cost=outcome.cost), "reward model"
        )

    async def _judged_at_once(self, samples: list[Sample], whole: int) -> list[Outcome]:
        """The outcomes of samples, of ``whole`` of their prompt, that a group verifier judges."""
        request, name = samples[0].request, self._verifier_of(samples[0])
        if whole < request.group_size:
            error = (
                f"verifier {name!r} judges all answers to a prompt at once, and was given {whole} "
                f"of {request.group_size}: they were collected for one that judges each by itself"
            )
            return [Failed(error=error)] * len(samples)
        use = self._uses.setdefault(request.name, JudgeUse())
        self.meter.serves(SCORE, self._capacity(name) * whole)
        answers = [Answer.of(one) for one in samples]
        outcomes = await self._judges.judge_group(name, answers, use)
        return [_of_prompt(request, one) for one in outcomes]

    def _tells(self, use: JudgeUse, verifier: str) -> bool:
        """Whether how often the verifier was called is more than that it was called once."""
        waits = verifier in self._pool.asynchronous
        return waits or use.retries > 0 or self.config.cache > 0


def _labels(sample: Sample) -> dict[str, str | int]:
    """Return what the trace tells of a sample; iteration -1: of an evaluation."""
    request, generated = sample.request, sample.generated
    episode = {"turns": len(sample.turns), "drawn": generated.drawn_tokens}
    return {
        "sample": request.name,
        "iteration": -1 if request.evaluation else request.iteration,
        "tokens": len(generated.token_ids),
        "rollout": sample.rollout_rank,
        **(episode if sample.episode is not None else {}),
    }


def _of_prompt(request: Request, outcome: Outcome) -> Outcome:
    """An outcome of a group verifier; of a failure, with the prompt that it is about."""
    if not isinstance(outcome, Failed):
        return outcome
    return Failed(error=f"prompt {request.prompt.index} (group {request.group}): {outcome.error}")


def _count(
    report: RewardReport, scored: list[ScoredSample], seconds: float, use: JudgeUse | None
) -> None:
    for one in scored:
        match one.outcome:
            case Scored():
                report.scored += 1
            case Rejected():
                report.rejected += 1
            case Failed():
                report.failed += 1
                report.last_failure = one.outcome.error
    report.seconds += seconds
    report.longest = max(report.longest, seconds)
    if use is not None:
        report.judges.calls += use.calls
        report.judges.retries += use.retries
        report.judges.cache_hits += use.cache_hits
