"""Carries out one task of a program, on whichever end it was given, and records what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rlinf_async.channels import (
    ChannelClosed,
    ChannelError,
    ChannelFailed,
    EndOfChannel,
    Fresh,
    NoReceivers,
    Receiver,
    Sender,
    TooStale,
    WireError,
    current_party,
)
from tests.channels.model.history import Event, Recorder
from tests.channels.model.items import make_item, number_of, replacement, times_replaced
from tests.channels.model.program import (
    NOWAIT,
    SENDING,
    TAKING,
    Do,
    Op,
    Program,
    end_of,
    item_number,
    name_of,
    party_of,
)

LAG = 8
"""Versions that an item may be old."""
OVER = EndOfChannel, ChannelClosed, ChannelFailed, NoReceivers
"""What says that the same operation would only fail again."""


class Spoilt(Exception):
    """What a lease's holder raises when the program says so."""


class SharedEnd:
    """An end, and how many tasks still use it: the last one closes it."""

    def __init__(self, end: Any) -> None:
        self.end = end
        self.users = 0

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.end.close()


class Party:
    """One task of a program.

    Args:
        here: whether the channel lives in this process.
        count_depth: is told the depth and weight that the channel says it has.
    """

    def __init__(
        self,
        program: Program,
        index: int,
        shared: SharedEnd,
        recorder: Recorder,
        *,
        here: bool,
        count_depth: Callable[[int, int], None] | None = None,
    ) -> None:
        self.index = index
        self._program = program
        self._task = program.tasks[index]
        self._name = end_of(self._task)
        self._shared = shared
        shared.users += 1
        self._end: Any = shared.end
        self._clones: list[Any] = []
        self._recorder = recorder
        self._here = here
        self._count_depth = count_depth
        self._puts = 0

    async def run(self) -> None:
        """Do everything, then close what is open."""
        current_party.set(party_of(self.index))
        try:
            for op in self._task.ops:
                await self._repeat(op)
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            for clone in self._clones:
                clone.close()
        except ChannelError:
            pass  # what became of items on their way is counted by the channel
        with contextlib.suppress(ChannelError):
            self._shared.leave()

    async def _repeat(self, op: Op) -> None:
        for _ in range(op.times):
            if op.cancel is None and op.cancel_after is None:
                go_on = await self._do(op)
            else:
                go_on = await self._do_and_cancel(op)
            if not go_on:
                return

    async def _do_and_cancel(self, op: Op) -> bool:
        doing = asyncio.create_task(self._do(op))
        try:
            if op.cancel is not None:
                for _ in range(op.cancel):
                    await asyncio.sleep(0)
                    if doing.done():
                        break
            else:
                others = self._recorder.after(op.cancel_after or 0)
                await asyncio.wait((doing, others), return_when=asyncio.FIRST_COMPLETED)
            doing.cancel()
            return await doing
        except asyncio.CancelledError:
            if not doing.done():  # it was this task that was cancelled
                doing.cancel()
                raise
            return True

    async def _do(self, op: Op) -> bool:
        """Do it once; whether it can be done again."""
        if op.do == "turn":
            for _ in range(op.turns or 1):
                await asyncio.sleep(0)
            return True
        if op.do in SENDING:
            return await self._put(op)
        if op.do == "lease":
            return await self._lease(op)
        if op.do in TAKING:
            return await self._take(op)
        return await self._other(op)

    def _event(self, op: Op, do: Do, least: int, most: int = 1) -> Event:
        event = Event(self.index, self._name, do, op.key, least, 0, most=most)
        self._recorder.begin(event)
        return event

    def _finish(self, event: Event, outcome: str) -> bool:
        event.outcome = outcome
        self._recorder.finish(event)
        return outcome == "ok"

    async def _guard(self, event: Event, doing: Awaitable[Any]) -> bool:
        """Wait for it, and record how it ended; whether it can be done again."""
        try:
            await doing
        except asyncio.CancelledError:
            self._finish(event, "cancelled")
            raise
        except OVER as error:
            return self._finish(event, type(error).__name__)
        except (ChannelError, TypeError) as error:
            self._finish(event, type(error).__name__)
            return not isinstance(error, WireError)
        self._finish(event, "ok")
        return True

    # ---- sending

    async def _put(self, op: Op) -> bool:
        number = item_number(self.index, self._puts)
        self._puts += 1
        item = make_item(self._program.payload, number, op.size)
        event = Event(self.index, self._name, op.do, op.key, op.weight, 0, items=[number])
        self._recorder.begin(event)
        sender: Sender[Any] = self._end

        async def nowait() -> None:
            sender.put_nowait(item, key=op.key, weight=op.weight)

        if op.do in NOWAIT and self._here:
            return await self._guard(event, nowait())
        return await self._guard(event, sender.put(item, key=op.key, weight=op.weight))

    # ---- taking

    async def _take(self, op: Op) -> bool:
        receiver: Receiver[Any] = self._end
        nowait = op.do == "get_nowait" and self._here
        batch = op.do == "batch"
        least = (op.at_least or op.weight) if batch else 1
        event = self._event(op, op.do, 0 if nowait else least, op.weight if batch else 1)

        async def take() -> None:
            if op.do == "batch":
                items = await receiver.get_batch(weight=op.weight, at_least=op.at_least, key=op.key)
            elif nowait:
                items = [receiver.get_nowait(key=op.key)]
            elif op.do == "iterate" and op.key is None:
                items = [await self._next(receiver)]
            elif op.do == "lag":
                items = [await self._within_lag(receiver, op)]
            else:
                items = [await receiver.get(key=op.key)]
            event.items = [number_of(item) for item in items]
            event.replaced = [times_replaced(item) for item in items]

        return await self._guard(event, take())

    async def _next(self, receiver: Receiver[Any]) -> Any:
        async for item in receiver:
            return item
        raise EndOfChannel("the loop ended")

    async def _within_lag(self, receiver: Receiver[Any], op: Op) -> Any:
        current = op.weight + LAG
        found = await receiver.get_within_lag(current=current, max_lag=LAG, key=op.key)
        assert found.lag == current - found.item.version
        assert isinstance(found, Fresh if found.lag <= LAG else TooStale)
        return found.item

    # ---- leases

    async def _lease(self, op: Op) -> bool:
        event = self._event(op, "lease", op.at_least or op.weight, op.weight)

        async def lease() -> None:
            async with self._end.lease(weight=op.weight, at_least=op.at_least, key=op.key) as items:
                await self._hold(event, items, op)

        return await self._guard_lease(event, lease())

    async def _hold(self, event: Event, items: Any, op: Op) -> None:
        event.fate = "returned"
        event.items = [number_of(item) for item in items]
        event.replaced = [times_replaced(item) for item in items]
        assert all(count >= 1 for count in items.deliveries)
        self._recorder.hand(event)
        for _ in range(op.turns):
            await asyncio.sleep(0)
        for inner in op.inside:
            await self._repeat(inner)
        if op.ending == "fail":
            raise Spoilt
        if op.ending == "cancel":
            raise asyncio.CancelledError
        if op.ending == "replace":
            for index in range(0, len(items), 2):
                items.replace(index, replacement(items[index]))
            event.returned = event.items[::2]
        event.fate = "unknown"
        event.settling = True
        self._recorder.hand(event)

    async def _guard_lease(self, event: Event, doing: Awaitable[Any]) -> bool:
        async def lease() -> None:
            try:
                await doing
            except Spoilt:
                event.fate = "returned"
                return
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                return
            event.fate = "consumed"

        return await self._guard(event, lease())

    # ---- the rest

    async def _other(self, op: Op) -> bool:
        event = Event(self.index, self._name, op.do, op.key, 0, 0)
        self._recorder.begin(event)
        return await self._guard(event, self._do_other(op))

    async def _do_other(self, op: Op) -> None:
        if op.do == "clone":
            self._end = self._end.clone(name_of(self._name))
            self._clones.append(self._end)
        elif op.do == "close":
            self._end.close()
        elif op.do == "flush":
            await self._end.flush()
        elif op.do == "fail":
            self._end.fail("the program says so")
        else:
            seen = await self._end.statistics()
            if self._count_depth is not None:
                self._count_depth(seen.depth, seen.weight)


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, rather than the program the block of a lease."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
