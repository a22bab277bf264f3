"""`replay`: one worker of a recorded run, alone, and whether it does again what it did."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.messages.language import (
    Failed,
    Request,
    Sample,
    Scored,
    ScoredSample,
)
from rlinf_async.recording.events import Launched
from rlinf_async.replaying.compare import Comparison
from rlinf_async.replaying.history import (
    Input,
    Life,
    Output,
    RecordedCall,
    answered_by,
    iterations_of,
    lives_of,
    versions_of,
)
from rlinf_async.replaying.playing import Play, Stage
from rlinf_async.replaying.report import Comparing, ReplayReport, Scores
from rlinf_async.replaying.script import Script, Transform
from rlinf_async.replaying.source import Source, opened
from rlinf_async.rewards.judging import load_verifier
from rlinf_async.workers.base import Worker
from rlinf_async.workers.reward import RewardWorker

DEFAULT_TOLERANCE: Final = 1e-6
CHECKPOINT: Final = "begin_checkpoint"
"""method of a worker that writes its state, to a folder that is its first argument"""
CHECKPOINTS: Final = "checkpoints"
"""folder of them in that of a run"""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is played, and how it is compared."""

    only: str
    """role of the worker, or name of its group, and its rank: ``"actor"``, ``"Rollout:1"``"""
    start: int | None = None
    """which start of the run, from 1; None: the last one that has this worker"""
    first: int | None = None
    """iteration from which on is compared; None: all"""
    tolerance: float = DEFAULT_TOLERANCE
    ignore: tuple[str, ...] = ()
    """names of further fields that are not compared"""
    verifier: str | None = None
    """verifier that scores instead of each sample's own"""


async def replay(
    run: str | Path,
    only: str,
    *,
    start: int | None = None,
    first: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    ignore: Sequence[str] = (),
    verifier: str | None = None,
) -> ReplayReport:
    """Play one worker of a recorded run again, in this process, and compare what it puts.

    Nothing else is started. The worker is given what it was given then, in that order; what it
    would write goes to a folder that is removed. Set a breakpoint in it, or run this under
    `rlinf_async.testing`'s virtual time.

    Args:
        run: the run's folder, or a bundle's.
        only: the worker: its role or group, and its rank if there are several, ``"actor"``,
            ``"Rollout:1"``.
        start: which start of a run that was resumed, from 1; by default the last one that has this
            worker.
        first: iteration from which on is compared: what was before is only played, or left out
            where the worker has no state, or a checkpoint of it is there.
        tolerance: largest difference of two numbers that are not whole; 0: none.
        ignore: names of fields that are not compared, besides measured times.
        verifier: scores instead of each sample's own; rewards are then not compared but reported.

    Raises:
        UsageError: there is no recording, or not of this worker; something that it names is not
            here; the worker cannot be played alone.
        WorkerError: the worker cannot be built.
    """
    with opened(Path(run)) as source:
        return await replay_opened(
            source,
            only,
            start=start,
            first=first,
            tolerance=tolerance,
            ignore=ignore,
            verifier=verifier,
        )


async def replay_opened(
    source: Source,
    only: str,
    *,
    start: int | None = None,
    first: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    ignore: Sequence[str] = (),
    verifier: str | None = None,
) -> ReplayReport:
    """As `replay`, of a recording that was opened."""
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance is {tolerance!r}: it is a number from 0")
    options = ReplayOptions(
        only=only,
        start=start,
        first=first,
        tolerance=tolerance,
        ignore=tuple(ignore),
        verifier=verifier,
    )
    return await _Replay(source, options).run()


class _Replay:
    """One replay, from the recording to the report."""

    def __init__(self, source: Source, options: ReplayOptions) -> None:
        self._source = source
        self._options = options

    async def run(self) -> ReplayReport:
        began = time.perf_counter()
        start, worker = self._source.worker(self._options.only, self._options.start)
        self._source.check_whole(start)
        lives = lives_of(worker, lambda: self._source.events(start), self._source.decoder(start))
        report = ReplayReport(worker=worker, start=start)
        source = self._source
        stage = Stage(lambda name: source.channel(start, name), source.folder, source.code)
        try:
            cls = stage.class_of(lives[0].launched)
            self._check(worker, cls, lives)
            plan = Plan.of(lives, cls, self._options.first, stage, source.cut_before(start))
            await self._play(report, plan, stage, cls)
        finally:
            stage.close()
        early = [found] if (found := source.ended_early(start)) else []
        report.notes = [*plan.notes, *stage.notes, *report.notes, *early]
        report.seconds = time.perf_counter() - began
        return report

    def _check(self, worker: str, cls: type[Worker], lives: Sequence[Life]) -> None:
        launched = lives[0].launched
        if launched.world > 1 and launched.details.get("collective"):
            raise UsageError(
                f"{worker} computes together with the other {launched.world - 1} ranks of "
                f"{launched.group} (torch.distributed, {launched.details['collective']}): a replay "
                "has one rank alone. Record a run with one rank of it"
            )
        if self._options.verifier is None:
            return
        if not issubclass(cls, RewardWorker):
            raise UsageError(
                f"a verifier is for a reward worker, and {worker} is a {cls.__name__}: "
                "--only reward"
            )
        load_verifier(self._options.verifier, ("data", "verifier"))

    async def _play(
        self, report: ReplayReport, plan: Plan, stage: Stage, cls: type[Worker]
    ) -> None:
        comparison = Comparison(self._options.tolerance, frozenset(self._options.ignore))
        verifier = self._options.verifier
        rescored = _Rescored(verifier) if verifier is not None else None
        ignored = frozenset() if rescored is None else _scored_channels(plan.lives)
        comparing = Comparing(report, comparison, plan.since, ignored)
        for index, life in enumerate(plan.lives):
            transform: Transform = _unchanged if rescored is None else rescored.sample
            script = Script(life, transform)
            play = Play(life, script, stage)
            overrides = dict(plan.overrides) if index == 0 else {}
            if verifier is not None and "verifier" in inspect.signature(cls).parameters:
                overrides["verifier"] = verifier  # goes before that of a sample
            await play.run(overrides)
            if rescored is not None:
                rescored.add(play)
            else:
                comparing.add(play)
        comparing.finish()
        if rescored is not None:
            report.scores = rescored.scores()
            report.lives = len(plan.lives)


def _unchanged(item: Any) -> Any:
    return item


class Plan(msgspec.Struct, kw_only=True):
    """Which lives are played, from where on, and from which event on is compared."""

    lives: list[Life]
    since: int = 0
    """number of the event from which on is compared"""
    overrides: dict[str, Any] = {}
    """arguments of the first life's class that are others than in the recording"""
    notes: list[str] = []
    from_number: int = 1
    """number of the event with which the part of the recording begins that is played; 1: the
    whole"""
    also: set[int] = set()
    """numbers of calls that are not played, but say where it begins"""

    @classmethod
    def of(
        cls,
        lives: list[Life],
        worker: type[Worker],
        first: int | None,
        stage: Stage,
        cut: int,
        *,
        smallest: bool = False,
    ) -> Plan:
        """The plan for an iteration to begin with.

        Args:
            lives: of the worker, in the recording.
            worker: its class.
            first: the iteration; None: from the beginning.
            stage: everything around it.
            cut: the recording has no events before this number.
            smallest: begin from a checkpoint where that is exact, though all is there.

        Raises:
            UsageError: there is no such iteration; the recording does not have what it needs.
        """
        since = max(0 if first is None else _number_of(lives, first), cut if cut > 1 else 0)
        last = next((one for one in reversed(lives) if one.launched.number <= since), lives[0])
        later = [one for one in lives if one.launched.number > last.launched.number]
        if since and worker.stateless:
            lives = [_later(last, since), *later]
            _check_given(lives, cut)
            return cls(lives=lives, since=since, from_number=since)
        begun = (_gone_checkpoint(one.launched, worker, stage) for one in lives)
        gone = next(filter(None, begun), "")
        if cut <= 1 and not smallest and not gone:
            return cls(lives=lives, since=since)
        found = _from_checkpoint(last, since, stage, cut)
        exact = worker.resumes_exactly(stage.named_arguments(worker, last.launched))
        if found is not None and (exact or gone or cut > 1):
            call, folder, version = found
            note = f"begun from its checkpoint {folder.name}"
            if not exact:
                note += ", which does not have all that it had in memory: numbers may differ"
            lives = [_resumed(last, call.begun.number, version), *later]
            _check_given(lives, cut)
            return cls(
                lives=lives,
                since=since,
                overrides={"resume": str(folder)},
                notes=[note],
                from_number=call.begun.number + 1,
                also={call.begun.call},
            )
        if cut > 1:
            raise UsageError(
                f"the recording begins with event {cut}: what was before was deleted for its "
                f"limit, and {last.launched.worker} has a state that came from there, of which "
                "there is no checkpoint before what is compared. Give --from a later iteration, or "
                "set recording.limit higher, or checkpoint_every lower"
            )
        if gone:
            raise UsageError(
                f"{last.launched.worker} was started from the checkpoint {gone}, which is not "
                "there any more (training.keep_checkpoints says how many are kept): restore it, or "
                "play it from a checkpoint that it wrote itself, with --from and a later iteration"
            )
        return cls(lives=lives, since=since)


def _number_of(lives: Sequence[Life], first: int) -> int:
    """Number of the event with which an iteration begins for a worker: the first item of it, or
    the weights with which it begins."""
    name = lives[0].launched.worker
    every = [given for life in lives for given in life.inputs]
    found = [(given.number, list(iterations_of(given))) for given in every]
    if not any(iterations for _, iterations in found):
        found = [(given.number, _weights_of(given)) for given in every]
    numbers = [number for number, iterations in found if any(one >= first for one in iterations)]
    known = [one for _, iterations in found for one in iterations]
    if not known:
        raise UsageError(
            f"--from {first}: what {name} was given does not say of which iteration it is: leave "
            "--from out"
        )
    if not numbers or first < min(known):
        raise UsageError(
            f"--from {first}: the recording of {name} has iterations {min(known)} to {max(known)}"
        )
    return min(numbers)


def _weights_of(given: Input) -> list[int]:
    versions = None if given.version is None else versions_of(given.items[0].value())
    return [] if versions is None else [versions[1]]


def _later(life: Life, since: int) -> Life:
    """A life of a worker without a state, from an event on: its calls that still ran, the newest
    weights, and what it said of these. Answers to what it was given before are not asked for."""
    weights = {one.channel: one for one in life.inputs if one.version and one.number < since}
    begun = min((one.number for one in weights.values()), default=since)
    inputs = [*weights.values(), *(one for one in life.inputs if one.number >= since)]
    given = {_request_of(body.value()) for one in inputs for body in one.items}

    def is_put_again(output: Output) -> bool:
        if output.number <= begun:
            return False
        item = output.body.value()
        if output.number < since:
            return answered_by(item, output.key) is None
        return not isinstance(item, (Sample, ScoredSample)) or _request_of(item) in given

    return msgspec.structs.replace(
        life,
        calls=[_from(call, since) for call in life.calls if _runs_at(call, since)],
        inputs=inputs,
        outputs=[one for one in life.outputs if is_put_again(one)],
    )


def _request_of(item: Any) -> str | None:
    """The name of the request that a question or an answer of a language run is about."""
    sample = item.sample if isinstance(item, ScoredSample) else item
    request = sample.request if isinstance(sample, Sample) else sample
    return request.name if isinstance(request, Request) else None


def _from(call: RecordedCall, number: int) -> RecordedCall:
    return msgspec.structs.replace(call, whole=call.begun.number >= number)


def _runs_at(call: RecordedCall, number: int) -> bool:
    return call.ended is None or call.ended.number >= number


def _check_given(lives: Sequence[Life], cut: int) -> None:
    """Raise `UsageError` where something that was given to the worker came before the first event
    of a recording that was cut."""
    if cut <= 1:
        return
    for life in lives:
        worker = life.launched.worker
        first = min((one.number for one in life.inputs if one.version is None), default=2**63)
        seen = {one.channel for one in life.inputs if one.version and one.number < first}
        ends = {end for call in life.calls if call.begun.number < first for end in call.begun.ends}
        unseen = {name for name, kind in ends if kind == "latest receiver"} - seen
        lost = [one.channel for one in life.inputs if len(one.items) < len(one.places)]
        for channel in (*lost, *(unseen if first < 2**63 else ())):
            raise UsageError(
                f"the recording begins with event {cut}: what was before was deleted for its "
                f"limit, and what {worker} was given from channel {channel!r} came from there. "
                "Give --from a later iteration, or set recording.limit higher"
            )


def _from_checkpoint(
    life: Life, since: int, stage: Stage, cut: int
) -> tuple[RecordedCall, Path, int] | None:
    """The newest checkpoint before an event: the call that wrote it, its folder, and the version
    that it has. What was given since one from before the recording's first event is not known."""
    old = str(life.launched.details.get("folder", ""))
    for call in reversed(life.calls):
        if call.begun.method != CHECKPOINT or call.ended is None:
            continue
        if not cut - 1 <= call.begun.number < since:  # a bundle begins right behind it
            continue
        path = stage.recorded_path(call.begun)
        folder = stage.folder / Path(path).relative_to(old) if path.startswith(old) else Path(path)
        if folder.is_dir():
            before = [one for one in life.outputs if one.number < call.begun.number]
            versions = [versions_of(one.body.value()) for one in before]
            known = [one[1] for one in versions if one is not None]
            return call, folder, max(known, default=0)
    return None


def _gone_checkpoint(launched: Launched, worker: type[Worker], stage: Stage) -> str:
    """The checkpoint that a worker was started from, where it is not there any more; else empty."""
    if "resume" not in inspect.signature(worker).parameters:
        return ""
    resume = stage.named_arguments(worker, launched).get("resume")
    if not isinstance(resume, (str, Path)) or Path(resume).parent.name != CHECKPOINTS:
        return ""
    return "" if Path(resume).is_dir() else str(resume)


def _resumed(life: Life, at: int, version: int) -> Life:
    """A life from its checkpoint on: with what it had been given for later iterations by then."""
    early = [
        one
        for one in life.inputs
        if one.number < at and any(iteration >= version for iteration in iterations_of(one))
    ]
    return msgspec.structs.replace(
        life,
        calls=[call for call in life.calls if call.begun.number > at],
        inputs=[*early, *(one for one in life.inputs if one.number >= at)],
        outputs=[one for one in life.outputs if one.number >= at],
    )


# ---- another verifier


class _Rescored:
    """Samples that another verifier scores.

    Args:
        verifier: its name.
    """

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._pairs: list[tuple[ScoredSample, ScoredSample]] = []

    def sample(self, item: Any) -> Any:
        """A sample, to be scored by that verifier."""
        if not isinstance(item, Sample):
            return item
        replace = msgspec.structs.replace
        prompt = replace(item.request.prompt, verifier=self._verifier)
        others = tuple(self.sample(one) for one in item.others)
        return replace(item, request=replace(item.request, prompt=prompt), others=others)

    def add(self, play: Play) -> None:
        """Take the scores of a life."""
        before: dict[str, ScoredSample] = {}
        for output in play.life.outputs:
            for scored in _scored_of(output.body.value()):
                before[scored.sample.request.name] = scored
        for done in (one for put in play.script.put.values() for one in put):
            for scored in _scored_of(done.item):
                known = before.get(scored.sample.request.name)
                if known is not None:
                    self._pairs.append((known, scored))

    def scores(self) -> Scores:
        """Both distributions."""
        both = [tuple(map(_reward, pair)) for pair in self._pairs]
        failed = [sum(pair[at] is None for pair in both) for at in (0, 1)]
        why = [after.outcome.error for _, after in self._pairs if isinstance(after.outcome, Failed)]
        return Scores(
            verifier=self._verifier,
            recorded=[pair[0] for pair in both if pair[0] is not None],
            replayed=[pair[1] for pair in both if pair[1] is not None],
            failed=(failed[0], failed[1]),
            changed=sum(pair[0] != pair[1] for pair in both),
            last_failure=why[-1] if why else "",
        )


def _scored_of(item: Any) -> list[ScoredSample]:
    return item.apart() if isinstance(item, ScoredSample) else []


def _reward(scored: ScoredSample) -> float | None:
    return scored.outcome.reward if isinstance(scored.outcome, Scored) else None


def _scored_channels(lives: Iterable[Life]) -> frozenset[str]:
    return frozenset(output.channel for life in lives for output in life.outputs)
