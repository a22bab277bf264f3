"""What the scheduler has seen of a run, as the `ClusterState` that a policy decides by."""

from __future__ import annotations

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ActorState,
    ClusterState,
    DeviceLedger,
    InstanceState,
    RequestState,
    instance_name,
)
from rlinf_async.workers.scheduler.config import Topology
from rlinf_async.workers.scheduler.messages import ActorReady, InstanceReport, RequestCount

UNKNOWN_TOKENS = 256.0
"""mean length of a response before one is finished"""


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
        self._refused: tuple[int, list[Strategy]] = (-1, [])

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
    ) -> ClusterState:
        """Return what a policy decides by.

        Args:
            ready: where the actor is.
            time: seconds, by the loop's clock.
            silent: instances that have not answered.
            sequence: of the last orders.
            ledger: who holds which device.
        """
        topology, boundary = self._topology, ready.boundary
        instances = tuple(
            self._instance(number, home, silent, ledger)
            for number, home in enumerate(topology.instances)
        )
        queued = max((one.queued for one in self.instances.values()), default=0)
        unfinished = queued + sum(one.load for one in instances)
        phase = {0: "begin", ready.mini_batches: "end"}.get(boundary.done, "step")
        mean = self._mean_tokens()
        return ClusterState(
            time=time,
            iteration=boundary.iteration,
            phase=phase,  # type: ignore[arg-type]  # one of the three
            samples=topology.samples,
            finished=max(0, topology.samples - unfinished),
            tokens=mean,
            queued=queued,
            queued_expected=queued * (mean or UNKNOWN_TOKENS),
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
                ready=True,
            ),
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
        requests = tuple(
            RequestState(name=one.name, made=one.made, expected=self._expected(one))
            for one in report.requests
        )
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

    def _expected(self, request: RequestCount) -> float:
        """Guess the tokens that are still to come: the mean's rest, or, of a request that is
        longer than that already, half as many again as it has: lengths have a long tail."""
        mean = self._mean_tokens() or UNKNOWN_TOKENS
        return min(float(request.most), max(mean - request.made, request.made / 2, 1.0))
