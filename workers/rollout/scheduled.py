"""A rollout worker that serves, or stops, as a scheduler says.

::

    orders, `Latest` --> stop, or serve on these devices; hand requests back; take some, or none
                     --> InstanceReport, once for each orders that are carried out
    responses that were sent, requests that were begun --> InstanceNews, without being asked

                waits for                                 unblocked by
    follow      orders                                    the scheduler
                requests that are handed back, or end     the engine
                memory, weights                           the engine, the actor

Orders say how things are to be: who missed some follows the newest.

How far the requests of a rollout worker are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import chain
from typing import Protocol

import msgspec

from rlinf_async.channels import EndOfChannel, LatestReceiver, Sender
from rlinf_async.channels.statistics import KeyState
from rlinf_async.messages.language import Generated, Request
from rlinf_async.workers.base import task_group
from rlinf_async.workers.scheduler.messages import (
    EndedCount,
    InstanceNews,
    InstanceReport,
    Orders,
    RequestCount,
    SchedulerReport,
)


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout worker is doing: counts, no tokens."""

    rank: int
    version: int
    """of the weights that it serves"""
    slots: int
    """requests that its engine decodes together"""
    samples: int
    """samples that it has sent on, since it was started"""
    tokens: int
    """tokens of these samples, prompts left out"""
    requests: tuple[RequestCount, ...]
    """the requests that are here, in the order in which they were taken"""


class Instance(Protocol):
    """What a rollout worker does for a scheduler."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def offloaded(self) -> bool:
        """It holds no device's memory."""
        ...

    @property
    def handed_back(self) -> int:
        """Requests that it has handed back."""
        ...

    async def offload(self, migrate: bool = False) -> None:
        """Take no more requests, and give the devices' memory back."""
        ...

    async def onload(self) -> None:
        """Take the memory again, load the newest weights, take requests."""
        ...

    async def use_devices(self, devices: tuple[int, ...]) -> None:
        """Serve on these devices from now on."""
        ...

    async def share_out(self, names: Collection[str], *, takes: bool) -> None:
        """Hand these requests back; take others, or leave them to other workers."""
        ...

    async def progress(self) -> RolloutProgress:
        """How far each request is."""
        ...

    async def queue_state(self) -> KeyState | None:
        """How many requests wait, and are with somebody; None: it does not serve."""
        ...


class SchedulerLink:
    """One rollout worker's side of a scheduler.

    Args:
        instance: the worker.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._follows = False
        """else nothing is noted"""
        self.orders = Orders()
        """the newest"""
        self._sending: dict[str, EndedCount] = {}
        """by request: responses that are generated, and not sent on"""
        self._ended: list[EndedCount] = []
        """since the last message"""
        self._known: dict[int, list[EndedCount]] = {}
        """by iteration: of the one that the actor trains and of later ones, for a scheduler that is
        started again"""
        self._began: list[str] = []
        """requests that were taken since then, where few instances take any"""
        self._news = asyncio.Event()

    async def follow(
        self, orders: LatestReceiver[Orders], reports: Sender[SchedulerReport]
    ) -> None:
        """Carry orders out until they end."""
        self._follows = True
        async with task_group() as group:
            telling = group.create_task(self._tell(reports))
            await self._follow(orders, reports)
            telling.cancel()

    async def _follow(
        self, orders: LatestReceiver[Orders], reports: Sender[SchedulerReport]
    ) -> None:
        instance, seen, scheduler = self._instance, 0, 0
        while True:
            try:
                newest = self.orders = await orders.get(newer_than=seen)
            except EndOfChannel:
                return
            seen = orders.version
            if newest.scheduler != scheduler:  # it does not know what another one was told
                scheduler, self._ended = newest.scheduler, [*chain(*self._known.values())]
            before = instance.handed_back
            devices = newest.devices_of(instance.rank)
            if not devices:
                await instance.offload(newest.migrate)
            else:
                await instance.use_devices(devices)
                if instance.offloaded:
                    await instance.onload()
                await self._share_out(newest)
            await reports.put(await self._report(newest, instance.handed_back - before))

    async def _share_out(self, orders: Orders) -> None:
        rank = self._instance.rank
        names = [name for one in orders.hand_back if one.instance == rank for name in one.names]
        takes = orders.takers is None or rank in orders.takers
        await self._instance.share_out(names, takes=takes)

    async def _report(self, orders: Orders, handed_back: int) -> InstanceReport:
        progress, queue = await self._instance.progress(), await self._instance.queue_state()
        ended, self._ended = self._ended, []
        return InstanceReport(
            instance=progress.rank,
            sequence=orders.sequence,
            devices=orders.devices_of(progress.rank),
            slots=progress.slots,
            samples=progress.samples,
            tokens=progress.tokens,
            queued=0 if queue is None else queue.depth,
            taken=0 if queue is None else queue.unsettled,
            requests=progress.requests,
            handed_back=handed_back,
            ended=tuple(ended),
        )

    # -- news ---------------------------------------------------------------------------------

    def began(self, request: Request) -> None:
        """A request was taken."""
        if self.orders.takers is not None:
            self._began.append(request.name)
            self._news.set()

    def generated(
        self, request: Request, generated: Generated, seconds: float, running: float
    ) -> None:
        """A response is complete, after so many seconds beside so many others."""
        if not self._follows:
            return
        brought = 0 if request.partial is None else len(request.partial.token_ids)
        tokens = len(generated.token_ids)
        self._sending[request.name] = EndedCount(
            group=request.group,
            tokens=tokens,
            name=request.name,
            iteration=-1 if request.evaluation else request.iteration,
            made=tokens - brought,
            seconds=seconds,
            running=running,
        )

    def sent(self, request: Request) -> None:
        """The sample of a request was sent on: until then it may be lost, and generated again."""
        if (ended := self._sending.pop(request.name, None)) is not None:
            self._ended.append(ended)
            self._known.setdefault(ended.iteration, []).append(ended)
            at = self.orders.boundary
            for over in [one for one in self._known if at is not None and one < at.iteration]:
                del self._known[over]
            self._news.set()

    async def _tell(self, reports: Sender[SchedulerReport]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._ended or self._began:
                ended, self._ended = self._ended, []
                began, self._began = self._began, []
                await reports.put(
                    InstanceNews(
                        instance=self._instance.rank, ended=tuple(ended), began=tuple(began)
                    )
                )
