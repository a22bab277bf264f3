"""`Control`: the scheduler's orders go out, reports come in, and waits for them have a limit.

Invariants: every report is noted once, by the one task that reads, in the order in which they came;
whoever waits looks again after each. No orders give a device that somebody else may hold (see
`Holdings`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import Logger, LoggerAdapter
from typing import Any

import msgspec

from rlinf_async.channels import (
    ChannelClosed,
    EndOfChannel,
    LatestReceiver,
    LatestSender,
    Receiver,
)
from rlinf_async.messages.language import Boundary
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import Resume, SchedulingConfig, instance_name
from rlinf_async.workers.scheduler.holdings import Holdings
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    DevicesReport,
    HandBack,
    InstanceNews,
    InstanceReport,
    Orders,
    SamplesTold,
    SchedulerReport,
    Topology,
)
from rlinf_async.workers.scheduler.monitor import MeasuredRates, Monitor


class Control:
    """Orders of the scheduler, and what is known of those who follow them.

    Args:
        topology: devices on which everyone was launched.
        config: limits, and what is known before.
        holdings: holdings, which say who may hold which device.
        incarnation: how often the scheduler was restarted.
        log: the scheduler's log.
    """

    def __init__(
        self,
        topology: Topology,
        config: SchedulingConfig,
        holdings: Holdings,
        incarnation: int,
        log: Logger | LoggerAdapter[Any],
    ) -> None:
        self._config, self._topology = config, topology
        self._incarnation, self._log = incarnation, log
        self.holdings = holdings
        self.monitor = Monitor(topology, config.lengths)
        self.rates = MeasuredRates(config.rates)
        self.newest = Orders()
        self.actor: ActorReady | None = None
        """last report of the actor: where it is, and what it has"""
        self.is_open = False
        """whether the actor waits at a boundary"""
        self.asks = False
        """whether the actor has come to a boundary at which nobody was asked yet"""
        self.devices: list[DevicesReport] = []
        """reports on devices that nobody has seen to yet"""
        self.fresh = 0
        """samples that were finished since the policy was asked"""
        self.unanswered = 0
        """waits that ended without an answer"""
        self.silent: set[int] = set()
        """instances that did not answer when they were asked last"""
        self._changed: dict[int, ActorChanged] = {}
        """last changes of the actor's ranks, by rank"""
        self._began: set[str] = set()
        self._over = False
        self._news = asyncio.Event()

    # -- orders -------------------------------------------------------------------------------

    async def open(self, orders: LatestSender[Orders], newest: LatestReceiver[Orders]) -> None:
        """Go on from the newest orders: every instance reports, and says what it holds."""
        self._orders = orders
        self.newest = await newest.get(newer_than=0)
        self.holdings.restore(self.newest)
        await self.publish()

    async def publish(
        self,
        *,
        devices: Mapping[int, tuple[int, ...]] | None = None,
        due: Iterable[Resume] | None = None,
        takers: tuple[int, ...] | None = None,
        hand_back: tuple[HandBack, ...] = (),
        ranks_report: bool = False,
        reason: str = "",
    ) -> None:
        """Publish the next orders. What is not said here stays as it was, but for what moves from
        one instance to another: then all take requests.

        Args:
            devices: devices of instances that have others from now on. Raises `DeviceTaken` where
                somebody else may hold one.
            due: instances that get devices later.
            takers: see `Orders`.
            hand_back: see `Orders`.
            ranks_report: see `Orders`.
            reason: see `Orders`.
        """
        last, sequence = self.newest, self.newest.sequence + 1
        has = list(last.devices)
        for number, given in (devices or {}).items():
            if given:
                self.holdings.give(number, given, sequence)
            has[number] = given
        self._began.clear()
        self.newest = msgspec.structs.replace(
            last,
            sequence=sequence,
            scheduler=self._incarnation,
            devices=tuple(has),
            due=last.due if due is None else tuple(due),
            held=self.holdings.ledger.holdings(),
            lost=self.holdings.ledger.lost,
            migrate=self._config.on_stop == "migrate",
            takers=takers,
            hand_back=hand_back,
            ranks_report=ranks_report,
            reason=reason,
        )
        self.holdings.tell()
        await self._orders.publish(self.newest)

    async def order_actor(
        self,
        boundary: Boundary,
        *,
        strategy: Strategy | None = None,
        holds: bool = True,
        goes_on: bool = True,
        ranks_report: bool = False,
        due: Iterable[Resume] | None = None,
        reason: str = "",
    ) -> None:
        """Tell the actor at this boundary what to be, and whether to go on.

        Raises `DeviceTaken` where somebody else may hold a device that it needs for it: where it
        takes its devices again, also those of the strategy that it had.
        """
        ready = self.actor
        if ready is not None:
            ranks = self.ranks_needed(ready, strategy) if holds else 0
            self.holdings.give_actor(ranks, self.newest.sequence + 1)
        self.newest = msgspec.structs.replace(
            self.newest,
            boundary=boundary,
            strategy=strategy,
            holds=holds,
            goes_on=goes_on,
        )
        if goes_on and ready is not None and ready.boundary == boundary:
            self.is_open = False
        await self.publish(due=due, ranks_report=ranks_report, reason=reason)

    def ranks_needed(self, ready: ActorReady, strategy: Strategy | None) -> int:
        """Return the ranks whose devices the actor needs for this strategy (None: as it is); where
        it takes them again, first for the one that it had."""
        if strategy is None:
            return ready.strategy.world_size
        return max(strategy.world_size, 0 if ready.holds else ready.strategy.world_size)

    # -- reports ------------------------------------------------------------------------------

    async def read(self, reports: Receiver[SchedulerReport]) -> None:
        """Note every report until nobody sends any more."""
        try:
            while True:
                self._note(await reports.get())
                self._wake()
        except (EndOfChannel, ChannelClosed):
            self._over = True
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _note(self, report: SchedulerReport) -> None:
        match report:
            case InstanceReport():
                self.monitor.note(report)
                self.holdings.note(report)
                self._note_ended(report)
            case InstanceNews():
                self._began.update(report.began)
                self._note_ended(report)
            case SamplesTold():
                self.monitor.responses.note_samples(report.ended)
                self.monitor.responses.forget_samples(report.replaced)
                self.fresh += len(report.ended)
            case ActorReady():
                self.actor, self.is_open, self.asks = report, True, True
                self.rates.trained(report.tokens, report.seconds, report.strategy)
            case ActorChanged():
                self._changed[report.rank] = report
                self.holdings.note_rank(report)
            case DevicesReport():
                self.devices.append(report)

    def _note_ended(self, report: InstanceReport | InstanceNews) -> None:
        self.monitor.responses.note(report.ended)
        self.rates.decoded(report.ended)
        self.fresh += sum(not one.turn for one in report.ended)

    # -- waiting ------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until a condition holds; return False if it does not within ``seconds``.

        Raises `EndOfChannel` once nobody reports any more.
        """
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    if self._over:
                        raise EndOfChannel("reports")
                    await self._news.wait()
        except TimeoutError:
            return condition()
        finally:
            self.holdings.tell()
        return True

    async def gather(self, instances: Collection[int], seconds: float, what: str) -> set[int]:
        """Wait until these instances have carried out the newest orders; those that have not."""
        sequence, left = self.newest.sequence, sorted(instances)

        def all_have() -> bool:  # looked at after every report: each instance is asked once
            while left and self.monitor.has(left[-1], sequence):
                left.pop()
            return not left

        if await self.until(all_have, seconds):
            return set()
        missing = {one for one in left if not self.monitor.has(one, sequence)}
        self.unanswered += 1
        names = ", ".join(instance_name(one) for one in sorted(missing))
        self._log.warning(
            "%s did not %s within %g s; everything else stays as it is", names, what, seconds
        )
        return missing

    async def begun(self, names: Collection[str], count: int, seconds: float) -> set[str]:
        """Wait until ``count`` of the named requests have begun after the newest orders; return
        those that have."""
        await self.until(lambda: len(self._began.intersection(names)) >= count, seconds)
        return self._began.intersection(names)

    async def changed(self, limit: float) -> list[ActorChanged] | None:
        """Wait until every rank of the actor has said what came of the newest orders; None: one has
        not, and nobody knows. The boundary of the actor is then as it was."""
        sequence, boundary = self.newest.sequence, self.newest.boundary
        workers = self._topology.workers or len(self._topology.actor)

        def said() -> list[ActorChanged]:
            here = (self._changed[rank] for rank in sorted(self._changed))
            return [one for one in here if one.sequence >= sequence and one.boundary == boundary]

        def answered() -> bool:
            return len(said()) == workers

        def left() -> bool:  # rank 0 is at another boundary, and has said nothing of this one
            elsewhere = self.is_open and self.actor is not None and self.actor.boundary != boundary
            return elsewhere and all(one.rank for one in said())

        await self.until(lambda: answered() or left(), limit)
        found = said()
        if answered():
            first = found[0]
            if self.actor is not None:
                self.actor = msgspec.structs.replace(
                    self.actor, strategy=first.strategy, holds=first.holds
                )
            return found
        self.unanswered += 1
        self._log.warning(
            "ranks %s of the actor did not say whether they have changed (limit: %g s); rollout "
            "workers do not get devices before it is known that the actor does not hold them",
            sorted(set(range(workers)) - {one.rank for one in found}),
            limit,
        )
        return None
