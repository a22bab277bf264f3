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

import msgspec

from rlinf_async.channels import (
    ChannelClosed,
    EndOfChannel,
    LatestReceiver,
    LatestSender,
    Receiver,
)
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ACTOR,
    DeviceLedger,
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
    InstanceReport,
    Orders,
    SchedulerReport,
)
from rlinf_async.workers.scheduler.seen import Seen, same_sizes


class SchedulerSummary(msgspec.Struct, kw_only=True):
    """The counts of one `SchedulerWorker.run`."""

    decisions: int = 0
    """boundaries at which the policy was asked"""
    changes: int = 0
    """strategies that came into force"""
    stopped: int = 0
    """instances that released their devices"""
    migrated: int = 0
    """requests that were handed back for that"""
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
    ) -> SchedulerSummary:
        """Decide at every boundary until nobody reports any more.

        Args:
            orders: to rollout workers and actors.
            newest: of the orders, the first of which are there before this is called.
            reports: of rollout workers and actors.
        """
        summary = SchedulerSummary()
        self._orders, self._reports = orders, reports
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
        state = self._seen.state(
            ready,
            time=asyncio.get_running_loop().time(),
            silent=silent,
            sequence=self._newest.sequence,
            ledger=self._ledger,
        )
        decision = self._policy.decide(state)
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

    async def _stop(self, decision: ScalingDecision, summary: SchedulerSummary) -> set[int]:
        """Stop instances; those that did not."""
        wanted = set(decision.stop)
        if not wanted:
            return set()
        await self._publish(stopped={*self._newest.stopped, *wanted}, reason=decision.reason)
        late = await self._gather(wanted, self.config.stop_seconds, "stop", summary)
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
        limit = self.config.change_seconds
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
        reason: str = "",
    ) -> None:
        """Publish the next orders; what is not said here stays as it was."""
        last = self._newest
        self._newest = Orders(
            sequence=last.sequence + 1,
            scheduler=self.incarnation,
            stopped=last.stopped if stopped is None else tuple(sorted(stopped)),
            migrate=self.config.on_stop == "migrate",
            boundary=boundary or last.boundary,
            strategy=strategy if boundary else last.strategy,
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
                self._seen.instances[report.instance] = report
            case ActorReady():
                self._ready = report
            case ActorChanged():
                self._changed[report.rank] = report

    def _explain_what_is_left_out(self, decision: ScalingDecision) -> None:
        moved = [one.source for one in decision.migrations if one.source not in decision.stop]
        if moved or decision.order or decision.actor_holds is not None:
            self.log.warning(
                "of the policy's decision in iteration %d this run carries out stop, actor and "
                "resume alone: no migration between instances that serve, no order, no actor that "
                "lends its own devices",
                decision.iteration,
            )
