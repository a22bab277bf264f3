"""What the scheduler has seen of a run, as the `ClusterState` that a policy decides by."""

from __future__ import annotations

from collections.abc import Sequence

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
from rlinf_async.workers.scheduler.messages import ActorReady, InstanceReport, RequestCount

UNKNOWN_TOKENS = 256.0
"""mean length of a response before one is finished"""
KNOWN_GROUPS = 4096
"""newest groups whose finished responses are remembered"""


def same_sizes(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies have the same sizes: sharding is the backend's own choice."""
    names = ("dp", "tp", "pp", "cp", "ep")
    return all(getattr(one, name) == getattr(other, name) for name in names)


class Seen:
    """The newest report of everyone.

    Args:
        topology: of the run.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.instances: dict[int, InstanceReport] = {}
        self._groups: dict[int, list[int]] = {}
        """tokens of finished responses, by group"""
        self._longest = 0
        self._refused: tuple[int, list[Strategy]] = (-1, [])

    def note(self, report: InstanceReport) -> None:
        """Take a report."""
        self.instances[report.instance] = report
        for one in report.ended:
            self._longest = max(self._longest, one.tokens)
            self._groups.setdefault(one.group, []).append(one.tokens)
            while len(self._groups) > KNOWN_GROUPS:
                del self._groups[next(iter(self._groups))]

    def refused(self, iteration: int, strategy: Strategy) -> None:
        """Note that the actor could not apply a strategy: it is not offered again until the next
        iteration."""
        known = self._refused[1] if self._refused[0] == iteration else []
        self._refused = iteration, [*known, strategy]

    def _offered(self, iteration: int) -> tuple[Strategy, ...]:
        since, refused = self._refused
        every = self._topology.strategies
        return tuple(one for one in every if since != iteration or one not in refused)

    def missing(self, sequence: int, among: set[int]) -> set[int]:
        """Return the instances among these that have not carried out the orders of a sequence."""
        return {one for one in among if not self._has(one, sequence)}

    def _has(self, instance: int, sequence: int) -> bool:
        report = self.instances.get(instance)
        return report is not None and report.sequence >= sequence

    def state(
        self,
        ready: ActorReady,
        *,
        time: float,
        silent: set[int],
        sequence: int,
        ledger: DeviceLedger,
        rates: Rates,
        queued: Sequence[RequestCount] | None = None,
    ) -> ClusterState:
        """Return what a policy decides by.

        Args:
            ready: where the actor is.
            time: seconds, by the loop's clock.
            silent: instances that have not answered.
            sequence: of the last orders.
            ledger: who holds which device.
            rates: measured.
            queued: requests that no instance has taken; None: their number alone is known.
        """
        topology, boundary = self._topology, ready.boundary
        instances = tuple(
            self._instance(number, home, silent, ledger)
            for number, home in enumerate(topology.instances)
        )
        waiting = max((one.queued for one in self.instances.values()), default=0)
        names = tuple(self._request(one) for one in queued or ())
        if queued is not None:
            waiting = len(names)
        unfinished = waiting + sum(one.load for one in instances)
        phase = {0: "begin", ready.mini_batches: "end"}.get(boundary.done, "step")
        mean = self._mean_tokens()
        return ClusterState(
            time=time,
            iteration=boundary.iteration,
            phase=phase,  # type: ignore[arg-type]  # one of the three
            samples=topology.samples,
            finished=max(0, topology.samples - unfinished),
            tokens=mean,
            longest=float(self._longest),
            group=topology.group,
            queued=waiting,
            queued_expected=sum(one.expected for one in names)
            if names
            else waiting * (mean or UNKNOWN_TOKENS),
            queued_requests=names,
            hosts=topology.hosts,
            lost=ledger.lost,
            instances=instances,
            actor=ActorState(
                devices=topology.actor,
                strategy=self._known(ready.strategy),
                home=topology.home,
                strategies=self._offered(boundary.iteration),
                mini_batches=ready.mini_batches,
                mini_batches_done=boundary.done,
                epochs=ready.epochs,
                ready=True,
            ),
            rates=rates,
            holdings=ledger.holdings(),
            loans=ledger.loans(),
            sequence=sequence,
        )

    def _known(self, strategy: Strategy) -> Strategy:
        """Return a strategy as the topology has it: how parameters are sharded is left out."""
        topology = self._topology
        same = (one for one in (topology.home, *topology.strategies) if same_sizes(one, strategy))
        return next(same, strategy)

    def _instance(
        self, number: int, home: tuple[int, ...], silent: set[int], ledger: DeviceLedger
    ) -> InstanceState:
        report = self.instances.get(number)
        held = ledger.held_by(instance_name(number))
        if report is None:
            return InstanceState(number=number, home=home, devices=held, answers=False)
        requests = tuple(self._request(one) for one in report.requests)
        running = min(len(requests), report.slots)
        return InstanceState(
            number=number,
            home=home,
            devices=held,
            slots=report.slots,
            running=running,
            waiting=len(requests) - running,
            made=sum(one.made for one in requests),
            expected=sum(one.expected for one in requests),
            requests=requests,
            answers=number not in silent,
        )

    def _mean_tokens(self) -> float:
        """Return the mean number of tokens of finished responses; 0: there is none."""
        samples = sum(one.samples for one in self.instances.values())
        return sum(one.tokens for one in self.instances.values()) / samples if samples else 0.0

    def _request(self, request: RequestCount) -> RequestState:
        return RequestState(name=request.name, made=request.made, expected=self.expected(request))

    def expected(self, request: RequestCount) -> float:
        """Guess the tokens that are still to come: the rest of the mean, of its own group where
        others of that are finished; of a request that is longer already, half as many again as it
        has: lengths have a long tail."""
        group = self._groups.get(request.group)
        mean = sum(group) / len(group) if group else self._mean_tokens() or UNKNOWN_TOKENS
        return min(float(request.most), max(mean - request.made, request.made / 2, 1.0))
