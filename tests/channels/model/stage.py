"""The owner of a program's channel: what it does whichever way the tasks are run.

It lets the tasks go on until they have ended or all wait, looks at who waits, then takes what is
left so that everybody can end, and looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rlinf_async.channels import (
    Channel,
    ChannelClosed,
    ChannelFailed,
    EndOfChannel,
    Receiver,
    current_party,
)
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import render
from tests.channels.model.history import OWNER, REST, Clock, History, Journal
from tests.channels.model.history import Event as Done
from tests.channels.model.items import item_type, number_of
from tests.channels.model.program import KEYS, Program
from tests.channels.model.waiting import waiting_wrongly

REST_BATCH = 64
PARTY = "the rest"


class Medium(Protocol):
    """How a stage knows that nothing goes on."""

    async def quiet(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> None:
        """Return when all of these have ended, or nothing seems to go on."""
        ...

    async def holds(self, condition: Callable[[], object]) -> bool:
        """Whether this comes to hold within the patience that there is."""
        ...

    async def ended(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> bool:
        """Wait for all of them; False when they wait for ever."""
        ...


def new_channel(program: Program) -> Channel[Any]:
    """The program's channel."""
    return Channel(
        item_type(program.payload),
        name="items",
        capacity=program.capacity,
        max_weight=program.max_weight,
        max_deliveries=program.max_deliveries,
    )


class Stage:
    """One run, in the process of the owner."""

    def __init__(
        self, program: Program, medium: Medium, *, local: bool, clock: Clock | None = None
    ) -> None:
        self.program = program
        self.medium = medium
        self.channel = new_channel(program)
        self.journal = Journal(clock)
        self.history = History(program, self.journal.events, local=local)
        self.refresh: Callable[[], None] = lambda: None
        """brings the history of other processes up to date"""
        self._senders = any(task.side == "send" for task in program.tasks)
        self._gate = None if self._senders else self.channel.sender.clone()
        self._witness = self.channel.receiver.clone() if program.witness else None
        self._rest: Receiver[Any] | None = None

    def note_depth(self, depth: int, weight: int) -> None:
        """The channel said so."""
        self.history.depths.append((depth, weight))

    async def conduct(self, parties: Sequence[Awaitable[Any]]) -> History:
        """Run the tasks to their end."""
        tasks = [asyncio.ensure_future(party) for party in parties]
        rest: list[asyncio.Task[None]] = []
        try:
            await self.medium.quiet(tasks, self.journal)
            await self._look("before the rest is taken")
            rest = self._take_the_rest()
            everybody = [*tasks, *rest]
            if not await self.medium.ended(everybody, self.journal):
                self.history.hung = self._who_hangs(everybody)
        finally:
            for task in (*tasks, *rest):
                task.cancel()
            ended = await asyncio.gather(*tasks, *rest, return_exceptions=True)
            # Also where it ended before its time, or a task before its first step.
            for end in (self._gate, self._witness, self._rest):
                if end is not None:
                    end.close()
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                self.history.violations.append(f"a task failed: {type(error).__name__}: {error}")
        return self.history

    async def close(self) -> None:
        """Every end is closed by now: look at what the channel says."""
        if not self.history.hung:
            failed = any(
                event.do == "fail" and event.outcome == "ok" for event in self.history.events
            )
            await self.medium.holds(lambda: not left_over(self.channel, failed=failed))
        self.history.statistics = statistics_of(self.channel.queue)
        self.history.dead = [*self.channel.dead_letters]

    async def _look(self, when: str) -> None:
        """Whoever waits must have a reason to, and the report must say who that is."""
        found: list[str] = []

        def right() -> bool:
            self.refresh()
            found[:] = waiting_wrongly(self.channel, self.history)
            return not found

        if not await self.medium.holds(right):
            self.history.violations += [f"{when}: {what}" for what in found]

    def _take_the_rest(self) -> list[asyncio.Task[None]]:
        rest = self._rest = self.channel.receiver.clone()
        self._resting = len(KEYS)
        if self._gate is not None:
            self._gate.close()
        if self._witness is not None:
            self._witness.close()
        return [asyncio.create_task(self._drain(rest, key)) for key in KEYS]

    async def _drain(self, rest: Receiver[Any], key: Any) -> None:
        current_party.set(PARTY)
        try:
            while True:
                event = Done(REST, OWNER, "batch", key, 1, 0, most=REST_BATCH)
                self.journal.begin(event)
                try:
                    items = await rest.get_batch(weight=REST_BATCH, at_least=1, key=key)
                except (EndOfChannel, ChannelFailed, ChannelClosed) as error:
                    event.outcome = type(error).__name__
                    self.journal.finish(event)
                    return
                event.items = [number_of(item) for item in items]
                event.outcome = "ok"
                self.journal.finish(event)
        finally:
            self._resting -= 1
            if not self._resting:
                rest.close()

    def _who_hangs(self, tasks: Sequence[asyncio.Future[Any]]) -> str:
        self.refresh()
        left = sum(not task.done() for task in tasks)
        doing = ", ".join(
            f"task {event.task} in {event.do} (key {event.key!r})"
            for event in self.history.events
            if not event.finished and not event.died
        )
        seen = statistics_of(self.channel.queue)
        return (
            f"{left} tasks wait for ever: {doing or 'not in an operation'}\n"
            f"depth={seen.depth} leases_out={seen.leases_out} senders={seen.senders}\n"
            + render(self.channel.waits())
        )


ZERO = (
    "depth", "weight", "keys", "waiting_putters", "waiting_getters", "leases_out", "prefetched",
    "credit",
    "senders", "receivers",
)  # fmt: skip


def left_over(channel: Channel[Any], *, failed: bool = False) -> list[str]:
    """The counts that must be zero when all is over, and are not. A failed channel keeps what was
    queued in it."""
    seen = statistics_of(channel.queue)
    kept = ("depth", "weight", "keys") if failed else ()
    return [
        f"{name}={value}" for name in ZERO if name not in kept and (value := getattr(seen, name))
    ]
