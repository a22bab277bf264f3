"""What the scheduler has seen of a run, as the `ClusterState` that a policy decides by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

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
from rlinf_async.workers.scheduler.config import Topology
from rlinf_async.workers.scheduler.messages import (
    ActorReady,
    EndedCount,
    InstanceReport,
    Orders,
    RequestCount,
)
from rlinf_async.workers.scheduler.responses import UNKNOWN_TOKENS, Responses

Phase: TypeAlias = Literal["begin", "step", "end"]


def same_sizes(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies have the same sizes: sharding is the backend's own choice."""
    names = ("dp", "tp", "pp", "cp", "ep")
    return all(getattr(one, name) == getattr(other, name) for name in names)


class Seen:
    """The newest report of everyone.

    Args:
        topology: of the run.
        lengths: of responses of an earlier run, in tokens.
    """

    def __init__(self, topology: Topology, lengths: Sequence[float] = ()) -> None:
        self._topology = topology
        self.instances: dict[int, InstanceReport] = {}
        self.queued = 0
        """requests that no instance has taken, by the reports on the newest orders"""
        self._taken = 0
        """requests that are with any instance, by the same"""
        self._sequence = 0
        """of these orders"""
        self._responses = Responses(topology.samples, topology.group, lengths)
        self._refused: tuple[int, list[Strategy]] = (-1, [])

    def note(self, report: InstanceReport) -> None:
        """Take a report."""
        self.instances[report.instance] = report
        if report.sequence > self._sequence:
            self._sequence, self.queued, self._taken = report.sequence, 0, 0
        if report.sequence == self._sequence:
            self.queued = max(self.queued, report.queued)
            self._taken = max(self._taken, report.taken)

    def note_ended(self, ended: Sequence[EndedCount]) -> None:
        """Take responses that are finished."""
        self._responses.note(ended)

    def begin(self, iteration: int) -> None:
        """An iteration begins: lengths are expected by those of the iterations before."""
        self._responses.begin(iteration)

    def finished(self, iteration: int) -> int:
        """Return the samples of an iteration that are generated, as far as is known."""
        return self._responses.finished(iteration)

    def arrived(self, ready: ActorReady) -> int:
        """Return the samples of whole groups that are generated, and not trained yet."""
        whole = self._responses.in_whole_groups(ready.boundary.iteration)
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
        """Return the requests that are somewhere."""
        return self.queued + self._taken

    def _unfinished(self, ready: ActorReady, phase: str) -> int:
        """Return the samples of the iteration that are still to be generated.

        What a worker that died had finished and not told is missing in the count: where no request
        is left, everything is generated.
        """
        missing = max(self._topology.samples - self.finished(ready.boundary.iteration), 0)
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
            phase: of the iteration.
            is_ready: whether the actor waits there, and can change.
            time: seconds, by the loop's clock.
            silent: instances that have not answered.
            orders: the last ones.
            ledger: who may hold which device.
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
        mean = self._responses.mean
        return ClusterState(
            time=time,
            iteration=boundary.iteration,
            phase=phase,
            samples=topology.samples,
            finished=topology.samples - self._unfinished(ready, phase),
            tokens=mean,
            longest=self._responses.longest,
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
        stopping = bool(devices) and not has
        due = next((one.devices for one in orders.due if one.instance == number), ())
        if report is None:
            return InstanceState(
                number=number,
                home=home,
                devices=devices,
                stopping=stopping,
                due=due,
                answers=False,
            )
        requests = tuple(self._request(one) for one in report.requests)
        running = min(len(requests), report.slots)
        return InstanceState(
            number=number,
            home=home,
            devices=devices,
            stopping=stopping,
            due=due,
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
        return RequestState(name=request.name, made=request.made, expected=self.expected(request))

    def expected(self, request: RequestCount) -> float:
        """Guess the tokens that are still to come; see `Responses`."""
        return self._responses.expected(request)
