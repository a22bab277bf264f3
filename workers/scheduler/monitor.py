"""`Monitor`: the newest reports of a run, as the `ClusterState` that a policy decides by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from rlinf_async.messages.language import RequestCount
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ActorState,
    ClusterState,
    DeviceLedger,
    InstanceState,
    Rates,
    RequestState,
    instance_name,
)
from rlinf_async.scheduling.policy import Predictor
from rlinf_async.workers.scheduler.messages import (
    ActorReady,
    EndedCount,
    InstanceReport,
    Orders,
    Topology,
)

UNKNOWN_TOKENS = 256.0
"""mean length of a response before one is finished"""
KNOWN_LENGTHS = 8192
"""least number of lengths that are remembered, once there were as many: in whole iterations"""


class Finished:
    """The responses, or the samples, of one iteration that are finished."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        """tokens of each response, by the name of its request"""
        self.tokens = 0
        """tokens of all finished responses"""
        self.groups: dict[int, list[int]] = {}
        """tokens of each response, by group"""
        self.whole = 0
        """groups of which all responses are finished"""
        self._forgotten: set[str] = set()

    def add(self, one: EndedCount, group_size: int) -> None:
        """Take a response; one that is finished twice counts once."""
        if one.name in self.lengths or one.name in self._forgotten:
            return
        self.lengths[one.name] = one.tokens
        self.tokens += one.tokens
        group = self.groups.setdefault(one.group, [])
        group.append(one.tokens)
        self.whole += len(group) == group_size

    def forget(self, one: EndedCount, group_size: int) -> None:
        """Leave a response out, also where it is told of later."""
        self._forgotten.add(one.name)
        if (tokens := self.lengths.pop(one.name, None)) is None:
            return
        self.tokens -= tokens
        group = self.groups[one.group]
        self.whole -= len(group) == group_size
        group.remove(tokens)
        if not group:
            del self.groups[one.group]


class Responses:
    """The responses that are finished, and how long others are expected to be. A sample is one
    response, or an episode of several turns.

    Within an iteration the short ones are finished first. So the lengths by which others are
    expected are those of whole iterations: of the newest so many responses, once there are more of
    them in an iteration, all would be long ones at its end.

    Args:
        samples: number of samples of an iteration.
        group: samples of a prompt.
        lengths: lengths of responses of an earlier run, in tokens.
    """

    def __init__(self, samples: int, group: int, lengths: Sequence[float] = ()) -> None:
        self._samples = samples
        self._group = group
        self._past: list[Sequence[float]] = [lengths] if len(lengths) else []
        """lengths by which others are expected, by iteration"""
        self._predictor = Predictor(lengths) if len(lengths) else None
        self._responses: dict[int, Finished] = {}
        """finished responses by iteration: the present one, and those ahead of it"""
        self._samples_of: dict[int, Finished] = {}
        """as `_responses`, finished samples"""
        self.longest = float(max(lengths, default=0.0))
        """tokens of the longest response so far; 0: none was seen"""

    def note(self, ended: Iterable[EndedCount]) -> None:
        """Take responses that are finished; an evaluation's tell nothing of an iteration."""
        for one in ended:
            self.longest = max(self.longest, float(one.tokens))
            if one.iteration >= 0:
                self._responses.setdefault(one.iteration, Finished()).add(one, self._group)
            if not one.turn:
                self.note_samples([one])

    def note_samples(self, ended: Iterable[EndedCount]) -> None:
        """Take samples that are finished, such as episodes."""
        for one in ended:
            if one.iteration >= 0:
                self._samples_of.setdefault(one.iteration, Finished()).add(one, self._group)

    def forget_samples(self, replaced: Iterable[EndedCount]) -> None:
        """Take samples whose group was replaced: others are still to be finished. Their lengths
        tell of those."""
        for one in replaced:
            here = self._samples_of.setdefault(one.iteration, Finished())
            here.forget(one, self._group)

    def begin(self, iteration: int) -> None:
        """An iteration begins: lengths are expected by those of the iterations before.

        One of which less than half was seen, since nobody listened, has told of its long ones only:
        it counts where nothing better is known.
        """
        past = self._past
        for older in [one for one in self._samples_of if one < iteration]:
            del self._samples_of[older]
        for older in sorted(one for one in self._responses if one < iteration):
            lengths = list(self._responses.pop(older).lengths.values())
            if not past or 2 * len(lengths) >= self._samples:
                past.append(lengths)
        while sum(len(one) for one in past[1:]) >= KNOWN_LENGTHS:
            del past[0]
        if past:
            self._predictor = Predictor([tokens for one in past for tokens in one])

    def finished(self, iteration: int) -> int:
        """Return the samples of an iteration that are generated, as far as is known."""
        here = self._samples_of.get(iteration)
        return 0 if here is None else len(here.lengths)

    def in_whole_groups(self, iteration: int) -> int:
        """Return the number of finished samples of an iteration whose groups are finished."""
        here = self._samples_of.get(iteration)
        return 0 if here is None else here.whole * self._group

    @property
    def mean(self) -> float:
        """Return the mean tokens of a response of the iterations before; until there is one, of the
        finished responses; 0: there is none."""
        if self._predictor is not None:
            return self._predictor.mean
        count = sum(len(one.lengths) for one in self._responses.values())
        return sum(one.tokens for one in self._responses.values()) / count if count else 0.0

    def expected(self, request: RequestCount) -> float:
        """Guess the tokens that are still to come.

        Of a request that has none yet and others of its group are finished: their mean, for prompts
        differ. Else by the lengths of earlier iterations, of those that are longer than it. While
        there are none, the rest of the mean; of a request that is longer already, half as many
        again as it has: lengths have a long tail.
        """
        known = (one.groups.get(request.group) for one in self._responses.values())
        group = next((one for one in known if one), None)
        if self._predictor is not None and not (group and not request.made):
            return min(float(request.most), self._predictor.left(request.made))
        mean = sum(group) / len(group) if group else self.mean or UNKNOWN_TOKENS
        return min(float(request.most), max(mean - request.made, request.made / 2, 1.0))


Phase: TypeAlias = Literal["begin", "step", "end"]


def same_sizes(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies have the same sizes: sharding is the backend's own choice."""
    names = ("dp", "tp", "pp", "cp", "ep")
    return all(getattr(one, name) == getattr(other, name) for name in names)


class Monitor:
    """The newest report of everyone.

    Args:
        topology: topology of the run.
        lengths: lengths of responses of an earlier run, in tokens.
    """

    def __init__(self, topology: Topology, lengths: Sequence[float] = ()) -> None:
        self._topology = topology
        self.instances: dict[int, InstanceReport] = {}
        self.queued = 0
        """requests that no instance has taken, by the reports on the newest orders"""
        self._taken = 0
        """requests that are with any instance, by the reports on the newest orders"""
        self._sequence = 0
        """sequence of the newest orders on which an instance has reported"""
        self.episodes: int | None = None
        """episodes that wait or are open; None: each sample is one response"""
        self.responses = Responses(topology.samples, topology.group, lengths)
        self._refused: tuple[int, list[Strategy]] = (-1, [])

    def note(self, report: InstanceReport) -> None:
        """Take a report."""
        self.instances[report.instance] = report
        if report.sequence > self._sequence:
            self._sequence, self.queued, self._taken = report.sequence, 0, 0
        if report.sequence == self._sequence:
            self.queued = max(self.queued, report.queued)
            self._taken = max(self._taken, report.taken)

    def arrived(self, ready: ActorReady) -> int:
        """Return the samples of whole groups that are generated, and not trained yet."""
        whole = self.responses.in_whole_groups(ready.boundary.iteration)
        first = max(ready.mini_batches // ready.epochs, 1)
        trained = ready.boundary.done * self._topology.samples // first
        return max(whole - trained, 0)

    def has_next(self, ready: ActorReady) -> bool:
        """Whether all samples of the next mini-batch are generated, as far as is known."""
        first = ready.mini_batches // ready.epochs
        if ready.boundary.done >= first:
            return True
        return self.arrived(ready) >= self._topology.samples // first

    def lacks(self, ready: ActorReady) -> bool:
        """Whether samples of the next mini-batch are still to be generated."""
        return not self.has_next(ready) and self._present() > 0

    def _present(self) -> int:
        """Return the requests that are somewhere, or the episodes: one that waits for a tool has no
        request."""
        return self.queued + self._taken if self.episodes is None else self.episodes

    def _unfinished(self, ready: ActorReady, phase: str) -> int:
        """Return the samples of the iteration that are still to be generated.

        What a worker that died had finished and not told is missing in the count: where no request
        is left, everything is generated.
        """
        missing = max(self._topology.samples - self.responses.finished(ready.boundary.iteration), 0)
        return missing if phase == "begin" or self._present() else 0

    def refused(self, iteration: int, strategy: Strategy) -> None:
        """Note that the actor could not apply a strategy: it is not offered again until the next
        iteration."""
        known = self._refused[1] if self._refused[0] == iteration else []
        self._refused = iteration, [*known, strategy]

    def _offered(self, iteration: int) -> tuple[Strategy, ...]:
        since, refused = self._refused
        every = self._topology.strategies
        return tuple(one for one in every if since != iteration or one not in refused)

    def has(self, instance: int, sequence: int) -> bool:
        """Whether an instance has carried out the orders of a sequence."""
        report = self.instances.get(instance)
        return report is not None and report.sequence >= sequence

    def state(
        self,
        ready: ActorReady,
        *,
        phase: Phase,
        is_ready: bool,
        time: float,
        silent: set[int],
        orders: Orders,
        ledger: DeviceLedger,
        rates: Rates,
        queued: Sequence[RequestCount] | None = None,
    ) -> ClusterState:
        """Return what a policy decides by.

        Args:
            ready: where the actor is.
            phase: phase of the iteration.
            is_ready: whether the actor waits there, and can change.
            time: seconds, by the loop's clock.
            silent: instances that have not answered.
            orders: the last ones.
            ledger: ledger of who may hold which device.
            rates: measured.
            queued: requests that no instance has taken; None: their number alone is known.
        """
        topology, boundary = self._topology, ready.boundary
        instances = tuple(
            self._instance(number, home, silent, orders, ledger)
            for number, home in enumerate(topology.instances)
        )
        waiting = self.queued
        names = tuple(self._request(one) for one in queued or ())
        if queued is not None:
            waiting = len(names)
        if self.episodes is not None:  # those that wait for tools come back
            waiting = max(waiting, self.episodes - sum(one.load for one in instances))
        mean = self.responses.mean
        return ClusterState(
            time=time,
            iteration=boundary.iteration,
            phase=phase,
            samples=topology.samples,
            finished=topology.samples - self._unfinished(ready, phase),
            tokens=mean,
            longest=self.responses.longest,
            group=topology.group,
            queued=waiting,
            queued_expected=sum(one.expected for one in names)
            if names
            else waiting * (mean or UNKNOWN_TOKENS),
            queued_requests=names,
            hosts=topology.hosts or dict.fromkeys(sorted(topology.owners), 0),
            lost=ledger.lost,
            instances=instances,
            actor=ActorState(
                devices=topology.actor,
                strategy=self._known(ready.strategy),
                home=topology.home,
                strategies=self._offered(boundary.iteration),
                holds=ready.holds,
                mini_batches=ready.mini_batches,
                mini_batches_done=boundary.done,
                epochs=ready.epochs,
                arrived=self.arrived(ready) if ready.collects else None,
                ready=is_ready,
            ),
            rates=rates,
            holdings=ledger.holdings(),
            loans=ledger.loans(),
        )

    def _known(self, strategy: Strategy) -> Strategy:
        """Return a strategy as the topology has it: how parameters are sharded is left out."""
        topology = self._topology
        same = (one for one in (topology.home, *topology.strategies) if same_sizes(one, strategy))
        return next(same, strategy)

    def _instance(
        self,
        number: int,
        home: tuple[int, ...],
        silent: set[int],
        orders: Orders,
        ledger: DeviceLedger,
    ) -> InstanceState:
        report, has = self.instances.get(number), orders.devices_of(number)
        devices = has or ledger.held_by(instance_name(number))
        known = InstanceState(
            number=number,
            home=home,
            devices=devices,
            stopping=bool(devices) and not has,
            due=next((one.devices for one in orders.due if one.instance == number), ()),
            answers=False,
        )
        if report is None:
            return known
        requests = tuple(self._request(one) for one in report.requests)
        running = min(len(requests), report.slots)
        return msgspec.structs.replace(
            known,
            slots=report.slots,
            sizes=self._topology.sizes,
            running=running,
            waiting=len(requests) - running,
            made=sum(one.made for one in requests),
            expected=sum(one.expected for one in requests),
            requests=requests,
            answers=number not in silent,
        )

    def _request(self, request: RequestCount) -> RequestState:
        return RequestState(
            name=request.name, made=request.made, expected=self.responses.expected(request)
        )


KEPT = 64
"""measurements of each kind that are kept"""
LEAST_TOKENS = 4
"""tokens of the shortest response that is measured: a shorter one is mostly its beginning and its
end"""


class MeasuredRates:
    """The newest measurements of a run, and the rates that follow from them.

    ::

        decoding   each finished response: its tokens, and the seconds in which its engine made them
        training   the actor, at each boundary: tokens of its last mini-batch, and their seconds
        changes    from the orders until everyone has carried them out

    A time is fitted as ``a + b x load``, with neither below 0, over the newest measurements.

    Args:
        known: rates from elsewhere, which are not measured again; those that are 0 are.
    """

    def __init__(self, known: Rates | None = None) -> None:
        self._known = known or Rates()
        self._steps: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """requests decoded together, seconds of a decoding step"""
        self._batches: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """tokens of a rank, times one over the ranks of its model; seconds of a mini-batch"""
        self.changes: deque[float] = deque(maxlen=KEPT)
        """seconds that changes of the actor's strategy took"""
        self.moves: deque[float] = deque(maxlen=KEPT)
        """seconds that instances took to stop"""

    def decoded(self, responses: Iterable[EndedCount]) -> None:
        """Note responses that an instance has finished."""
        self._steps.extend(
            (one.running, one.seconds / one.made) for one in responses if one.made >= LEAST_TOKENS
        )

    def trained(self, tokens: int, seconds: float, strategy: Strategy) -> None:
        """Note a mini-batch: tokens of one data rank."""
        if tokens:
            together = strategy.world_size // strategy.dp
            self._batches.append((tokens / together, seconds))

    def rates(self) -> Rates:
        """Return what is known by now."""
        known = self._known
        decode, sequence = _line(self._steps, alike_is_constant=True)
        batch, token = _line(self._batches, alike_is_constant=False)
        if known.decode_seconds:
            decode, sequence = known.decode_seconds, known.sequence_seconds
        if known.train_seconds:
            batch, token = known.mini_batch_seconds, known.train_seconds
        return msgspec.structs.replace(
            known,
            decode_seconds=decode,
            sequence_seconds=sequence,
            train_seconds=token,
            mini_batch_seconds=batch,
            rescale_seconds=known.rescale_seconds or _mean(self.changes),
            move_seconds=known.move_seconds or _mean(self.moves),
        )


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


def _line(points: Sequence[tuple[float, float]], *, alike_is_constant: bool) -> tuple[float, float]:
    """Fit ``seconds = a + b x load`` by least squares, with neither below 0; zeros without points.

    Where the loads are too much alike to tell the two apart, all of it is ``a`` (a decoding step is
    mostly the reading of weights) or ``b`` (training is mostly arithmetic).
    """
    if not points:
        return 0.0, 0.0
    load, seconds = _mean([one for one, _ in points]), _mean([one for _, one in points])
    spread = sum((one - load) ** 2 for one, _ in points)
    through = sum(x * y for x, y in points) / max(sum(x * x for x, _ in points), 1e-12)
    if spread < 0.01 * len(points) * load**2:
        return (seconds, 0.0) if alike_is_constant else (0.0, through)
    slope = sum((x - load) * (y - seconds) for x, y in points) / spread
    if slope <= 0.0:
        return seconds, 0.0
    if seconds < slope * load:
        return 0.0, through
    return seconds - slope * load, slope
