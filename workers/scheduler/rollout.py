"""`ScheduledRollout`: a rollout worker that serves, or stops, as a scheduler says.

::

    orders, `Latest` --> stop, or serve on these devices; hand requests back; take some, or none
                     --> InstanceReport, once for each orders that are carried out
    responses that were sent, requests that were begun --> InstanceNews, without being asked

                waits for                                 unblocked by
    follow      orders                                    the scheduler
                requests that are handed back, or end     the engine
                memory, weights                           the engine, the actor

Orders say how things are to be: who missed some follows the newest.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from rlinf_async.backends.parts import DEFAULT_ENGINE
from rlinf_async.channels import EndOfChannel, LatestReceiver, Receiver, Sender
from rlinf_async.messages.language import Boundary, Generated, Request, Sample, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import task_group
from rlinf_async.workers.rollout.language import (
    LanguageRolloutConfig,
    LanguageRolloutReport,
    LanguageRolloutWorker,
)
from rlinf_async.workers.scheduler.messages import (
    EndedCount,
    InstanceNews,
    InstanceReport,
    Orders,
    SchedulerReport,
)


class EndedLog:
    """What is finished and not trained, and what of it the scheduler was not told of."""

    def __init__(self) -> None:
        self._untold: list[EndedCount] = []
        self._known: dict[int, list[EndedCount]] = {}
        """by iteration"""

    def add(self, one: EndedCount) -> None:
        """Take what is finished; the same one twice does no harm."""
        self._untold.append(one)
        self._known.setdefault(one.iteration, []).append(one)

    def take(self) -> tuple[EndedCount, ...]:
        """Return what is to be told, from now on told."""
        untold, self._untold = self._untold, []
        return tuple(untold)

    def tell_again(self) -> None:
        """Have all of it told: a scheduler that was started again knows nothing of it."""
        self._untold = [*chain(*self._known.values())]

    def forget(self, before: Boundary | None) -> None:
        """Forget the iterations before that of the actor's boundary: they are trained."""
        for over in [one for one in self._known if before is not None and one < before.iteration]:
            del self._known[over]


class ScheduledRollout(LanguageRolloutWorker):
    """One rank of the rollout group of a run with a scheduler.

    Args:
        engine: see `LanguageRolloutWorker`.
        config: as for `LanguageRolloutWorker`.
        backend: registered name of the backend.
        guests: number of the last ranks that hold no devices until the scheduler gives them some.
    """

    def __init__(
        self,
        engine: Any,
        config: LanguageRolloutConfig | None = None,
        *,
        backend: str = DEFAULT_ENGINE,
        guests: int = 0,
    ) -> None:
        super().__init__(engine, config, backend=backend)
        # Others may hold its devices: the actor, whose they are, or which has grown there.
        self._starts_stopped = self.rank >= self.world_size - guests or self.incarnation > 0
        self.orders = Orders()
        """the newest orders"""
        self._sending: dict[str, EndedCount] = {}
        """responses that are generated but not sent on, by request"""
        self._ended = EndedLog()
        """responses that were sent on"""
        self._began: list[str] = []
        """requests that were taken since the last message, where few instances take any"""
        self._news = asyncio.Event()

    async def serve_scheduled(
        self,
        requests: Receiver[Request],
        samples: Sender[Sample],
        weights: LatestReceiver[WeightUpdate],
        taken: Sender[WeightsTaken],
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
        sticky: bool = False,
    ) -> LanguageRolloutReport:
        """Answer requests until there are no more, but stop and resume as ``orders`` say, from the
        first of them on, until they end with the run.

        To ``reports`` it says once for each orders that they are carried out. Raises what `serve`
        does.
        """
        self._key = self.rank if sticky else None
        await self._taking.close()  # until the first orders
        async with task_group() as group:
            group.create_task(self.follow(requests, orders, reports))
            return await self._serve(group, requests, samples, weights, taken)

    async def follow(
        self,
        requests: Receiver[Request],
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
    ) -> None:
        """Carry orders out until they end. Override it to be deaf."""
        async with task_group() as group:
            telling = group.create_task(self._send_news(reports))
            await self._follow(requests, orders, reports)
            telling.cancel()
        self._taking.open()  # nothing is requested any more: it sees the end

    async def _follow(
        self,
        requests: Receiver[Request],
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
    ) -> None:
        seen = scheduler = 0
        while True:
            try:
                newest = self.orders = await orders.get(newer_than=seen)
            except EndOfChannel:
                return
            seen = orders.version
            if newest.scheduler != scheduler:  # it does not know what another one was told
                scheduler = newest.scheduler
                self._ended.tell_again()
            before = self._handed_back
            await self._carry_out(newest)
            report = await self._report(newest, requests, self._handed_back - before)
            await reports.put(report)

    async def _carry_out(self, orders: Orders) -> None:
        devices = orders.devices_of(self.rank)
        if not devices:
            await self.stop(hand_back=orders.migrate)
            return
        if self.stopped or devices != self.serves_on:
            await self.resume(devices)
        takes = orders.takers is None or self.rank in orders.takers
        if not takes:
            await self._taking.close()
        if names := [
            name for one in orders.hand_back if one.instance == self.rank for name in one.names
        ]:
            await self.interrupt(names)
        if takes:
            self._taking.open()

    async def _report(
        self, orders: Orders, requests: Receiver[Request], handed_back: int
    ) -> InstanceReport:
        # Over all keys: turns of episodes lie under those of several instances.
        progress, queue = await self.progress(), await requests.statistics()
        return InstanceReport(
            instance=progress.rank,
            sequence=orders.sequence,
            devices=orders.devices_of(progress.rank),
            slots=progress.slots,
            samples=progress.samples,
            tokens=progress.tokens,
            queued=queue.depth,
            taken=queue.leases_out,
            requests=progress.requests,
            handed_back=handed_back,
            ended=self._ended.take(),
        )

    # -- news ---------------------------------------------------------------------------------

    def began(self, request: Request) -> None:
        """Note that a request was taken."""
        if self.orders.takers is not None:
            self._began.append(request.name)
            self._news.set()

    async def generate(self, request: Request) -> Generated | None:
        """Measure for how long a response was made, beside how many others."""
        loop, running = asyncio.get_running_loop(), self.running
        began = loop.time()
        generated = await super().generate(request)
        if generated is not None and generated.finish != "abort":
            brought = 0 if request.partial is None else len(request.partial.token_ids)
            tokens = len(generated.token_ids)
            self._sending[request.name] = EndedCount(
                group=request.group,
                tokens=tokens,
                name=request.name,
                iteration=-1 if request.evaluation else request.iteration,
                turn=request.turn,
                made=tokens - brought,
                seconds=loop.time() - began,
                running=(running + self.running) / 2,
            )
        return generated

    def sent(self, request: Request) -> None:
        """Note that a sample was sent on: until then it may be lost, and generated again."""
        if (ended := self._sending.pop(request.name, None)) is None:
            return  # the same request is here twice
        self._ended.add(ended)
        self._ended.forget(self.orders.boundary)
        self._news.set()

    async def _send_news(self, reports: Sender[SchedulerReport]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            ended, began, self._began = self._ended.take(), self._began, []
            if ended or began:
                await reports.put(InstanceNews(instance=self.rank, ended=ended, began=tuple(began)))
