"""`SchedulerWorker`: collects reports, asks its policy, and has its decisions carried out.

::

    actor rank 0 --ActorReady--> [ ask all instances -> policy -> stop -> actor -> resume ]
    rollout --InstanceNews----->        |        ^                 |       |        |
                                      Orders   reports           Orders  Orders   Orders

                     waits for                               unblocked by
    run              an actor at a boundary; a share of      actor rank 0; rollout workers
                     the samples; devices that are lost
    asking           a report of every instance              rollout workers; `answer_seconds`
    carrying out     see `Changes`

The policy is asked at each boundary of the actor, and whenever so many more samples are done
(``every``): then instances can change, and the actor, if it waits at a boundary: because it has
lent its devices, or because it trains only whole mini-batches and the next one is not there.

Every wait has a limit, after which the log says who did not answer and everything else stays as it
is. A scheduler that dies holds nothing that others need: the actor goes on with the strategy it
has, or waits for its successor if its devices are lent; rollout workers do as the last orders say.
Its successor reads the newest orders and goes on from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack

from rlinf_async.channels import (
    ChannelClosed,
    EndOfChannel,
    LatestReceiver,
    LatestSender,
    Receiver,
)
from rlinf_async.messages.language import Boundary, Request, RequestCount
from rlinf_async.scheduling import (
    ClusterState,
    DeviceLedger,
    ScalingDecision,
    ScalingPolicy,
    SchedulingConfig,
    load_policy,
    safe,
)
from rlinf_async.workers.base import Worker
from rlinf_async.workers.scheduler.changes import Changes, SchedulerSummary
from rlinf_async.workers.scheduler.control import Control
from rlinf_async.workers.scheduler.holdings import Holdings
from rlinf_async.workers.scheduler.messages import (
    ActorReady,
    Orders,
    SchedulerReport,
    Topology,
)
from rlinf_async.workers.scheduler.monitor import Phase

ORDER_SECONDS = 0.2
"""seconds of waiting for a request that was in the queue a moment ago"""


class SchedulerWorker(Worker):
    """The scheduler of a run.

    Args:
        topology: devices on which everyone was launched.
        config: policy and limits.
    """

    def __init__(self, topology: Topology, config: SchedulingConfig | None = None) -> None:
        self.config = config or SchedulingConfig()
        self.topology = topology
        self.policy = safe(
            self.make_policy(), self.config.policy, lambda text: self.log.warning("%s", text)
        )
        self._requests: Receiver[Request] | None = None
        self._tasks: Receiver[Request] | None = None
        self._phase: Phase = "end"
        self._arrived_at: Boundary | None = None
        """boundary of the actor whose mini-batch the policy knows to be there"""
        self._holdings = Holdings(topology, self.devices_moved)

    def make_policy(self) -> ScalingPolicy:
        """Make the policy. Override it to bring your own."""
        return load_policy(self.config.policy, ("scheduler", "policy"))

    @property
    def ledger(self) -> DeviceLedger:
        """Ledger of who holds which device, as far as is known."""
        return self._holdings.ledger

    def devices_moved(self) -> None:
        """Devices have another holder: see `ledger`. Override it to watch."""

    def decided(self, state: ClusterState, decision: ScalingDecision) -> None:
        """A decision is about to be carried out. Override it to watch."""

    async def run(
        self,
        orders: LatestSender[Orders],
        newest: LatestReceiver[Orders],
        reports: Receiver[SchedulerReport],
        requests: Receiver[Request] | None = None,
        tasks: Receiver[Request] | None = None,
    ) -> SchedulerSummary:
        """Decide until nobody reports any more.

        Args:
            orders: to rollout workers and actors.
            newest: receiver of the orders, the first of which are there before this is called.
            reports: reports of rollout workers and actors.
            requests: requests that rollout workers take, for policies that order them.
            tasks: tasks that episode workers take, where samples are episodes. Their turns are not
                ordered: each belongs to the engine that has its context.
        """
        topology, config = self.topology, self.config
        self._requests, self._tasks = requests if tasks is None else None, tasks
        control = self._control = Control(
            topology, config, self._holdings, self.incarnation, self.log
        )
        changes = self._changes = Changes(control, topology, config, self.log)
        reading = asyncio.create_task(control.read(reports), name=f"{self.name} reads reports")
        try:
            await control.open(orders, newest)
            while True:
                # Where the actor waits, nobody may be left who reports: it is asked for anyway.
                limit = config.answer_seconds if control.is_open else None
                due = await control.until(self._is_due, limit)
                moved = bool(control.devices)
                while control.devices:
                    report = control.devices.pop(0)
                    await changes.lose(report.lost)
                    await changes.find(report.found)
                if changes.can_give_due:
                    await changes.give_due()
                waits = control.is_open and (moved or not due)
                if control.asks or waits or self._has_progressed():
                    await self._decide()
        except (EndOfChannel, ChannelClosed):  # the run is over, perhaps within a decision
            changes.summary.policy_fault = self.policy.fault
            changes.summary.unanswered = control.unanswered
            return changes.summary
        finally:
            reading.cancel()

    # -- when to decide -----------------------------------------------------------------------

    def _is_due(self) -> bool:
        control = self._control
        due = control.devices or self._changes.can_give_due
        return bool(control.asks or due or self._has_progressed())

    def _has_progressed(self) -> bool:
        """Whether enough samples were finished since the policy was asked."""
        control, samples = self._control, self.topology.samples
        if control.actor is None or self._phase == "end" or not control.fresh:
            return False
        if control.fresh >= max(1.0, self.config.every * samples):
            return True
        actor = control.actor
        if control.is_open and actor.collects and self._arrived_at != actor.boundary:
            return control.monitor.has_next(actor)
        return control.monitor.responses.finished(actor.boundary.iteration) >= samples

    def _next_phase(self, ready: ActorReady) -> Phase:
        if ready.boundary.done == ready.mini_batches:
            return "end"
        first = self._control.asks and not ready.boundary.done
        return "begin" if first and self._phase == "end" else "step"

    # -- one decision -------------------------------------------------------------------------

    async def _decide(self) -> None:
        """Ask the policy, and have its decision carried out; an actor that waits gets an answer."""
        control, changes = self._control, self._changes
        everyone = range(len(self.topology.instances))
        control.fresh = 0
        await control.publish()
        control.silent = await control.gather(everyone, self.config.answer_seconds, "report")
        if control.actor is not None and control.is_open:
            await changes.ask_all_ranks(control.actor)
        if self._tasks is not None:
            tasks = await self._tasks.state()
            control.monitor.episodes = tasks.depth + tasks.unsettled
        ready = control.actor
        if ready is None:
            return
        phase = self._next_phase(ready)
        if phase == "begin":
            control.monitor.responses.begin(ready.boundary.iteration)
        changes.summary.decisions += control.asks
        self._phase, control.asks = phase, False
        with self.span("decide", iteration=ready.boundary.iteration, phase=phase):
            state, decision = await self._asked(ready)
            self.decided(state, decision)
            lacks = ready.collects and control.monitor.lacks(ready)
            # One that comes to its boundary meanwhile is not let go by a decision made before.
            stays = not state.actor.ready or decision.actor_waits or lacks
            if control.monitor.has_next(ready):
                self._arrived_at = ready.boundary
            await changes.carry_out(decision, holds_boundary=stays)

    async def _asked(self, ready: ActorReady) -> tuple[ClusterState, ScalingDecision]:
        """Ask the policy; where it orders requests, give those in the queue their new places.

        The queue is leased meanwhile. What goes back replaces what was taken, place by place, in
        one settlement: no request is lost or there twice, wherever this worker dies.
        """
        requests = self._requests
        waiting = self._control.monitor.queued
        if requests is None or not waiting or not self.policy.orders:
            return self._answer(ready)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    lease = await held.enter_async_context(
                        requests.lease(weight=waiting, at_least=1)
                    )
            except (TimeoutError, EndOfChannel):  # instances have taken them all meanwhile
                return self._answer(ready)
            there = list(lease)
            state, decision = self._answer(ready, [RequestCount.of(one) for one in there])
            ordered = in_order(there, decision.order)
            for place, one in enumerate(ordered):
                lease.replace(place, one)
            self._changes.summary.ordered += sum(
                a is not b for a, b in zip(there, ordered, strict=True)
            )
            return state, decision

    def _answer(
        self, ready: ActorReady, queued: list[RequestCount] | None = None
    ) -> tuple[ClusterState, ScalingDecision]:
        state = self._control.monitor.state(
            ready,
            phase=self._phase,
            is_ready=self._control.is_open and self._control.actor is ready,
            time=asyncio.get_running_loop().time(),
            silent=self._control.silent,
            orders=self._control.newest,
            ledger=self.ledger,
            rates=self._control.rates.rates(),
            queued=queued,
        )
        return state, self.policy.decide(state)


def in_order(requests: list[Request], names: Collection[str]) -> list[Request]:
    """Return the requests with these names first, in their order, others after them; those of an
    iteration before those of the next, for which nobody waits yet."""
    place = {name: at for at, name in enumerate(names)}
    return sorted(requests, key=lambda one: (one.iteration, place.get(one.name, len(place))))
