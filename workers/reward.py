"""`RewardWorker`: every sample gets its outcome; first done, first out.

::

    Sample ---lease---> exact, numeric ------------------------------+---> ScoredSample
              |                                                      |
              +-------> a free process ---verifier, time limit-------+

                waits for                              unblocked by
    run         a sample; room for one more            rollout or inference; a sample that is done
    scoring     a process; its outcome, in time        another sample that is done; the verifier
    sending     room in the channel of scored ones     the collector

Invariant: a sample stays leased until its outcome was put, so a crash loses none. One that was put
just before the crash may come a second time: its name (``sample.request.name``) tells.

A sample that takes long holds up no other while a process is free. So that several workers share
the samples evenly, a worker takes no more than it has processes, and as many again for those that
wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.channels.wire.session.tls import FILE_VARIABLE, VARIABLE
from rlinf_async.config.counts import MOST_WORKERS, check_bounds
from rlinf_async.messages.language import Failed, Outcome, Rejected, Sample, Scored, ScoredSample
from rlinf_async.rewards.judging import INLINE, Answer, Verifier, judge, load_verifier
from rlinf_async.rewards.pool import ScoringPool
from rlinf_async.workers.base import Worker, task_group

SCORE: Final = "score"
"""name of the spans, and of the sums, of scoring"""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reward worker."""

    processes: int = 2
    """processes, each of which scores a sample at a time; ``exact`` and ``numeric`` need none"""
    time_limit: float = 10.0
    """longest time of a verifier for one sample, in seconds"""
    memory_limit_mib: int = 4096
    """memory limit of each process; 0: none"""
    environment: tuple[str, ...] = ()
    """names of environment variables that verifiers get beside a minimal set, such as the key of a
    server that they ask"""
    preload: tuple[str, ...] = ()
    """verifiers imported before the first sample, so that a wrong name is an error at the start"""

    def __post_init__(self) -> None:
        check_bounds(self, "processes", least=1, most=MOST_WORKERS)
        check_bounds(self, "memory_limit_mib", least=0)
        if secret := sorted({VARIABLE, FILE_VARIABLE} & set(self.environment)):
            raise ValueError(
                f"environment has {secret[0]}: with the cluster's secret a verifier could be a "
                "worker; leave it out"
            )
        if not 0.0 < self.time_limit < float("inf"):
            raise ValueError(
                f"time_limit is {self.time_limit}; it must be a number of seconds above 0"
            )


class RewardReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `RewardWorker.run`."""

    scored: int = 0
    rejected: int = 0
    failed: int = 0
    seconds: float = 0.0
    """time in verifiers, including waits for a process, as a sum over samples"""
    longest: float = 0.0
    """longest time of a sample, in seconds"""
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
            swapped while the run went on. Empty: that of the record.
    """

    stateless = True

    def __init__(self, config: RewardConfig | None = None, verifier: str = "") -> None:
        self.config = config or RewardConfig()
        self._verifier = verifier
        self._inline: dict[str, Verifier] = {}

    async def setup(self) -> None:
        """Import the verifiers of ``preload``.

        Raises:
            ConfigError: a verifier of ``preload`` cannot be loaded.
        """
        self._pool = ScoringPool(
            processes=self.config.processes,
            time_limit=self.config.time_limit,
            memory_limit_mib=self.config.memory_limit_mib,
            environment=self.config.environment,
        )
        preload = [name for name in self.config.preload if name not in INLINE]
        if preload:
            try:
                await self._pool.load(preload)
            except BaseException:
                await self._pool.close()
                raise

    async def teardown(self) -> None:
        """Kill all processes."""
        await self._pool.close()

    async def run(self, samples: Receiver[Sample], scored: Sender[ScoredSample]) -> RewardReport:
        """Score samples until there are no more.

        A verifier that raises, hangs, or ends its process is no error here but an outcome.

        Raises:
            NoReceivers: nobody takes scored samples any more.
        """
        report = RewardReport()
        self.meter.serves(SCORE, 2 * self.config.processes)
        async with task_group() as group:
            for _ in range(2 * self.config.processes):
                group.create_task(self._score_each(samples, scored, report))
        return report

    async def score(self, sample: Sample) -> Outcome:
        """The outcome of one sample. Override it for scores that come from elsewhere."""
        name, answer = self._verifier or sample.request.prompt.verifier, Answer.of(sample)
        if name not in INLINE:
            self.meter.serves(SCORE, self.config.processes)
            return await self._pool.judge(name, answer)
        if name not in self._inline:
            self._inline[name] = load_verifier(name)
            self.meter.serves(SCORE, 1)
        return judge(name, self._inline[name], answer)

    async def _score_each(
        self, samples: Receiver[Sample], scored: Sender[ScoredSample], report: RewardReport
    ) -> None:
        """Score one sample after the other. Several tasks do so at a time."""
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(EndOfChannel):
            while True:
                async with samples.lease() as [sample]:
                    started = clock()
                    outcome = sample.outcome  # of an episode that scores itself, or failed
                    verifier = "" if outcome else self._verifier
                    if not isinstance(outcome, Failed):
                        with self.span(SCORE, **_labels(sample)):
                            outcome = outcome or await self.score(sample)
                    seconds = clock() - started
                    _count(report, outcome, seconds)
                    await scored.put(
                        ScoredSample(
                            sample=sample, outcome=outcome, seconds=seconds, verifier=verifier
                        )
                    )


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


def _count(report: RewardReport, outcome: Outcome, seconds: float) -> None:
    match outcome:
        case Scored():
            report.scored += 1
        case Rejected():
            report.rejected += 1
        case Failed():
            report.failed += 1
            report.last_failure = outcome.error
    report.seconds += seconds
    report.longest = max(report.longest, seconds)
