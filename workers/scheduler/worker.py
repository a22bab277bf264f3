"""`SchedulerWorker`: collects reports, asks its policy, and has its decisions carried out.

::

    actor rank 0 --ActorReady--> [ ask all instances -> policy -> stop -> actor -> resume ]
                                        |        ^                 |       |        |
                                      Orders   reports           Orders  Orders   Orders

                     waits for                               unblocked by
    run              an actor at a boundary                  actor rank 0
    asking           a report of every instance              rollout workers; `answer_seconds`
    stopping         those that have to stop, resuming       rollout workers; `stop_seconds`
    changing         the actor's new strategy                its ranks; `change_seconds`

Invariant, **one holder**: a device is given to somebody only after its last holder has reported
that it released it. Every wait has a limit, after which the log says who did not answer and
everything else stays as it is.

A scheduler that dies holds nothing that others need: the actor goes on with the strategy it has,
rollout workers as the last orders say. Its successor reads the newest orders and goes on from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack

import msgspec

from rlinf_async.channels import (
    ChannelClosed,
    EndOfChannel,
    LatestReceiver,
    LatestSender,
    Receiver,
)
from rlinf_async.messages.language import Request
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ACTOR,
    ClusterState,
    DeviceLedger,
    Migration,
    ScalingDecision,
    ScalingPolicy,
    instance_name,
    load_policy,
    safe,
)
from rlinf_async.workers.base import Worker
from rlinf_async.workers.scheduler.config import SchedulingConfig, Topology
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    Boundary,
    HandBack,
    InstanceReport,
    Orders,
    RequestCount,
    SchedulerReport,
)
from rlinf_async.workers.scheduler.rates import MeasuredRates
from rlinf_async.workers.scheduler.seen import Seen, same_sizes

ORDER_SECONDS = 0.2
"""for which it waits for a request that was in the queue a moment ago"""
LANDING_SECONDS = 0.02
"""between two looks at whether an instance has taken what moves to it"""


class SchedulerSummary(msgspec.Struct, kw_only=True):
    """The counts of one `SchedulerWorker.run`."""

    decisions: int = 0
    """boundaries at which the policy was asked"""
    changes: int = 0
    """strategies that came into force"""
    stopped: int = 0
    """instances that released their devices"""
    migrated: int = 0
    """requests that were handed back, for that or for another instance"""
    targeted: int = 0
    """of these, those that went to an instance that the policy named"""
    ordered: int = 0
    """requests that were given another place in the queue"""
    unanswered: int = 0
    """waits that ended without an answer"""
    failed: int = 0
    """strategies that the actor could not apply"""
    policy_fault: str = ""
    """why the policy is not asked any more"""


class SchedulerWorker(Worker):
    """The scheduler of a run.

    Args:
        topology: who was launched on which devices.
        config: policy and limits.
    """

    def __init__(self, topology: Topology, config: SchedulingConfig | None = None) -> None:
        self.config = config or SchedulingConfig()
        self._topology = topology
        self._policy = safe(
            self.make_policy(), self.config.policy, lambda text: self.log.warning("%s", text)
        )
        self._seen = Seen(topology)
        self._rates = MeasuredRates()
        self._requests: Receiver[Request] | None = None
        self._newest = Orders()
        self._ready: ActorReady | None = None
        self._changed: dict[int, ActorChanged] = {}
        """by rank"""
        devices = {*topology.actor, *(one for home in topology.instances for one in home)}
        self._ledger = DeviceLedger({one: topology.hosts.get(one, 0) for one in devices})

    def make_policy(self) -> ScalingPolicy:
        """Make the policy. Override it to bring your own."""
        return load_policy(self.config.policy, ("scheduler", "policy"))

    async def run(
        self,
        orders: LatestSender[Orders],
        newest: LatestReceiver[Orders],
        reports: Receiver[SchedulerReport],
        requests: Receiver[Request] | None = None,
    ) -> SchedulerSummary:
        """Decide at every boundary until nobody reports any more.

        Args:
            orders: to rollout workers and actors.
            newest: of the orders, the first of which are there before this is called.
            reports: of rollout workers and actors.
            requests: that rollout workers take, for policies that order them.
        """
        summary = SchedulerSummary()
        self._orders, self._reports, self._requests = orders, reports, requests
        self._newest = await newest.get(newer_than=0)
        await self._publish()  # every instance reports, and says whether it serves
        try:
            while True:
                while self._ready is None:
                    self._note(await reports.get())
                ready, self._ready = self._ready, None
                summary.decisions += 1
                with self.span("decide", iteration=ready.boundary.iteration):
                    await self._decide(ready, summary)
        except (EndOfChannel, ChannelClosed):  # the run is over, perhaps within a decision
            summary.policy_fault = self._policy.fault
            return summary

    # -- one decision -------------------------------------------------------------------------

    async def _decide(self, ready: ActorReady, summary: SchedulerSummary) -> None:
        """Ask the policy, and have its decision carried out; the actor gets an answer."""
        everyone = set(range(len(self._topology.instances)))
        await self._publish()
        silent = await self._gather(everyone, self.config.answer_seconds, "report", summary)
        self._take_stock(ready)
        decision = await self._asked(ready, silent, summary)
        self._explain_what_is_left_out(decision)
        before = self._newest.stopped
        if late := await self._stop(decision, summary):
            self._newest = msgspec.structs.replace(self._newest, stopped=before)
            await self._answer(ready.boundary, None)
            await self._resumed(set(decision.stop) - late, summary)
            return
        strategy = decision.actor
        if strategy is not None and same_sizes(strategy, ready.strategy):
            strategy = None
        await self._answer(ready.boundary, strategy, decision.reason)
        if strategy is None or await self._change(ready.boundary, strategy, summary):
            await self._resume([one.instance for one in decision.resume], summary)
        elif self._says(ready.boundary):  # it is known what the actor holds: as before
            await self._resume(decision.stop, summary)
        await self._migrate(decision, summary)

    async def _asked(
        self, ready: ActorReady, silent: set[int], summary: SchedulerSummary
    ) -> ScalingDecision:
        """Ask the policy; where it orders requests, give those in the queue their new places.

        The queue is leased meanwhile. What goes back replaces what was taken, place by place, in
        one settlement: no request is lost or there twice, wherever this worker dies.
        """
        requests = self._requests
        waiting = max((one.queued for one in self._seen.instances.values()), default=0)
        if requests is None or not waiting or not self._policy.orders:
            return self._policy.decide(self._state(ready, silent))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    lease = await held.enter_async_context(
                        requests.lease(weight=waiting, at_least=1)
                    )
            except (TimeoutError, EndOfChannel):  # instances have taken them all meanwhile
                return self._policy.decide(self._state(ready, silent))
            there = list(lease)
            decision = self._policy.decide(
                self._state(ready, silent, [request_count(one) for one in there])
            )
            ordered = in_order(there, decision.order)
            for place, one in enumerate(ordered):
                lease.replace(place, one)
            summary.ordered += sum(a is not b for a, b in zip(there, ordered, strict=True))
            return decision

    def _state(
        self, ready: ActorReady, silent: set[int], queued: list[RequestCount] | None = None
    ) -> ClusterState:
        return self._seen.state(
            ready,
            time=asyncio.get_running_loop().time(),
            silent=silent,
            sequence=self._newest.sequence,
            ledger=self._ledger,
            rates=self._rates.rates(),
            queued=queued,
        )

    async def _migrate(self, decision: ScalingDecision, summary: SchedulerSummary) -> None:
        """Move requests between instances that serve, one target after the other.

        Those that leave go back to the queue in their places, and only the target takes requests
        until it has them: whoever dies meanwhile, they are in the queue. A target that has no room
        for them, or does not take them in time, leaves them to everyone.
        """
        for target, moves in _by_target(decision).items():
            leaving = [
                HandBack(instance=one.source, names=here)
                for one in moves
                if self._serves(one.source) and (here := self._names(one))
            ]
            names = {name for one in leaving for name in one.names}
            sources = {one.instance for one in leaving}
            takers = set(range(len(self._topology.instances))) - sources
            takers = {one for one in takers if self._serves(one)} & (
                takers if target is None else {target}
            )
            if not names or sum(map(self._room, takers)) < len(names):
                continue
            await self._publish(takers=tuple(sorted(takers)), hand_back=tuple(leaving))
            if not await self._gather(
                sources, self.config.answer_seconds, "hand requests back", summary
            ):
                summary.migrated += sum(self._seen.instances[one].handed_back for one in sources)
                landed = await self._land(names, takers, summary)
                summary.targeted += 0 if target is None else landed
            await self._publish()  # all take requests again

    async def _land(self, names: set[str], takers: set[int], summary: SchedulerSummary) -> int:
        """Wait until these instances have taken these requests; how many they have."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.answer_seconds
        landed: set[str] = set()
        while loop.time() < until:
            last = self._newest
            await self._publish(takers=last.takers)
            if await self._gather(takers, self.config.answer_seconds, "report", summary):
                break
            seen = [self._seen.instances[one] for one in takers]
            landed |= {request.name for one in seen for request in one.requests} & names
            if landed == names or not any(one.queued for one in seen):
                break
            await asyncio.sleep(LANDING_SECONDS)
        return len(landed)

    def _serves(self, instance: int) -> bool:
        return bool(self._ledger.held_by(instance_name(instance)))

    def _names(self, migration: Migration) -> tuple[str, ...]:
        """Return the requests that leave: those named, or those with the most tokens to come."""
        report = self._seen.instances.get(migration.source)
        here = () if report is None else report.requests
        if migration.names:
            return tuple(one.name for one in here if one.name in migration.names)
        longest = sorted(here, key=lambda one: (-self._seen.expected(one), one.name))
        return tuple(one.name for one in longest[: migration.count])

    def _room(self, instance: int) -> int:
        report = self._seen.instances.get(instance)
        return 0 if report is None else max(report.slots - len(report.requests), 0)

    async def _stop(self, decision: ScalingDecision, summary: SchedulerSummary) -> set[int]:
        """Stop instances; those that did not."""
        wanted = set(decision.stop)
        if not wanted:
            return set()
        began = asyncio.get_running_loop().time()
        await self._publish(stopped={*self._newest.stopped, *wanted}, reason=decision.reason)
        late = await self._gather(wanted, self.config.stop_seconds, "stop", summary)
        if not late:
            self._rates.moved(asyncio.get_running_loop().time() - began)
        done = wanted - late
        for one in done:
            self._ledger.release(instance_name(one))
            summary.stopped += 1
            summary.migrated += self._seen.instances[one].handed_back
        return late

    async def _change(
        self, boundary: Boundary, strategy: Strategy, summary: SchedulerSummary
    ) -> bool:
        """Wait until all ranks of the actor have their new strategy; False if they have not, or
        nobody knows."""
        limit, began = self.config.change_seconds, asyncio.get_running_loop().time()
        await self._until(lambda: self._ready is not None or self._says(boundary), limit)
        said = [self._changed[rank] for rank in sorted(self._changed)]
        if not self._says(boundary):
            summary.unanswered += 1
            missing = set(range(len(self._topology.actor))) - {one.rank for one in said}
            self.log.warning(
                "ranks %s of the actor did not say whether they have changed to dp=%d (limit: %g "
                "s); rollout workers that have stopped stay so until it is known what it holds",
                sorted(missing),
                strategy.dp,
                limit,
            )
            return False
        if all(same_sizes(one.strategy, strategy) for one in said):
            summary.changes += 1
            self._rates.changed(asyncio.get_running_loop().time() - began)
            self._hold(strategy, until=f"end of iteration {boundary.iteration}")
            return True
        summary.failed += 1
        self._seen.refused(boundary.iteration, strategy)
        self.log.warning("the actor goes on with dp=%d: %s", said[0].strategy.dp, said[0].error)
        return False

    def _says(self, boundary: Boundary) -> bool:
        """Whether every rank has said what came of the change at this boundary."""
        of = [one for one in self._changed.values() if one.boundary == boundary]
        return len(of) == len(self._topology.actor)

    async def _resume(self, instances: Collection[int], summary: SchedulerSummary) -> None:
        """Let instances serve again whose devices nobody holds."""
        free = set(self._ledger.free)
        back = {one for one in instances if free.issuperset(self._topology.instances[one])}
        if not back:
            return
        await self._publish(stopped=set(self._newest.stopped) - back)
        await self._resumed(back, summary)

    async def _resumed(self, instances: set[int], summary: SchedulerSummary) -> None:
        for one in instances:  # it may have them from now on, whether it answers or not
            self._ledger.take(instance_name(one), self._topology.instances[one])
        await self._gather(instances, self.config.stop_seconds, "come back", summary)

    async def _answer(
        self, boundary: Boundary, strategy: Strategy | None, reason: str = ""
    ) -> None:
        await self._publish(boundary=boundary, strategy=strategy, reason=reason)

    # -- who holds what -----------------------------------------------------------------------

    def _take_stock(self, ready: ActorReady) -> None:
        """Enter into the ledger what everyone says of itself.

        The actor's word counts first: what it holds, no instance was told to have.
        """
        held = {ACTOR: self._topology.actor[: ready.strategy.world_size]}
        for number, home in enumerate(self._topology.instances):
            report = self._seen.instances.get(number)
            serves = number not in self._newest.stopped or report is None or report.serves
            free = set(held[ACTOR]).isdisjoint(home)
            held[instance_name(number)] = home if serves and free else ()
        self._ledger.assign(held)

    def _hold(self, strategy: Strategy, *, until: str) -> None:
        """The actor has these devices; those beyond its own are lent to it."""
        own = self._topology.actor[: self._topology.home.world_size]
        holds = self._topology.actor[: strategy.world_size]
        self._ledger.release(ACTOR)
        self._ledger.take(ACTOR, [one for one in holds if one in own])
        for number, home in enumerate(self._topology.instances):
            if lent := [one for one in holds if one in home and one not in own]:
                self._ledger.lend(instance_name(number), ACTOR, lent, until=until)

    # -- messages -----------------------------------------------------------------------------

    async def _publish(
        self,
        *,
        stopped: Collection[int] | None = None,
        boundary: Boundary | None = None,
        strategy: Strategy | None = None,
        takers: tuple[int, ...] | None = None,
        hand_back: tuple[HandBack, ...] = (),
        reason: str = "",
    ) -> None:
        """Publish the next orders. What is not said here stays as it was, but for what moves from
        one instance to another: then all take requests."""
        last = self._newest
        self._newest = Orders(
            sequence=last.sequence + 1,
            scheduler=self.incarnation,
            stopped=last.stopped if stopped is None else tuple(sorted(stopped)),
            migrate=self.config.on_stop == "migrate",
            boundary=boundary or last.boundary,
            strategy=strategy if boundary else last.strategy,
            takers=takers,
            hand_back=hand_back,
            reason=reason,
        )
        await self._orders.publish(self._newest)

    async def _gather(
        self, instances: set[int], seconds: float, what: str, summary: SchedulerSummary
    ) -> set[int]:
        """Wait until these instances have carried out the newest orders; those that have not."""
        sequence = self._newest.sequence

        def missing() -> set[int]:
            return self._seen.missing(sequence, instances)

        if await self._until(lambda: not missing(), seconds):
            return set()
        summary.unanswered += 1
        names = ", ".join(instance_name(one) for one in sorted(missing()))
        self.log.warning(
            "%s did not %s within %g s; everything else stays as it is", names, what, seconds
        )
        return missing()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Read reports until a condition holds; False if it does not within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._note(await self._reports.get())
        except TimeoutError:
            return condition()
        return True

    def _note(self, report: SchedulerReport) -> None:
        match report:
            case InstanceReport():
                self._seen.note(report)
                self._rates.decoded(report.ended)
            case ActorReady():
                self._ready = report
                self._rates.trained(report.tokens, report.seconds, report.strategy)
            case ActorChanged():
                self._changed[report.rank] = report

    def _explain_what_is_left_out(self, decision: ScalingDecision) -> None:
        if decision.actor_holds is not None:
            self.log.warning(
                "the policy's decision in iteration %d that the actor lends its own devices is not "
                "carried out in a run, whose actor has none of its own in common with instances",
                decision.iteration,
            )


def request_count(request: Request) -> RequestCount:
    """Return how far a request in the queue is."""
    made = 0 if request.partial is None else len(request.partial.token_ids)
    return RequestCount(
        name=request.name, made=made, most=request.sampling.max_tokens - made, group=request.group
    )


def in_order(requests: list[Request], names: Collection[str]) -> list[Request]:
    """Return the requests with these names first, in their order, others after them; those of an
    iteration before those of the next, for which nobody waits yet."""
    place = {name: at for at, name in enumerate(names)}
    return sorted(requests, key=lambda one: (one.iteration, place.get(one.name, len(place))))


def _by_target(decision: ScalingDecision) -> dict[int | None, list[Migration]]:
    """Return the migrations of instances that go on serving, by their target."""
    found: dict[int | None, list[Migration]] = {}
    for one in decision.migrations:
        if one.source not in decision.stop:
            found.setdefault(one.target, []).append(one)
    return found
