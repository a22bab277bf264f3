"""Runs a program step by step over a channel of this process and over the reference, and compares.

Between two steps everything is settled, so that the outcome of each operation, every count, and who
waits are exactly those of the reference. A step begins the next operation of some task, cancels the
one that it waits in, or ends the lease that it holds; the program's seed says which task's turn it
is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from random import Random
from typing import Any, Final

import msgspec

from rlinf_async.channels import Channel, ChannelError, TooStale, current_party
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import run, wait_all_blocked
from tests.channels.model.items import VERSIONS, make_item, number_in, replacement, times_replaced
from tests.channels.model.party import LAG, Spoilt
from tests.channels.model.program import (
    LEASING,
    NOWAIT,
    SENDING,
    TAKING,
    EndName,
    Op,
    Program,
    end_names,
    end_of,
    item_number,
)
from tests.channels.model.reference import Put, Reference, Take
from tests.channels.model.stage import new_channel

MOST_TIMES: Final = 12
"""Of one operation in a row: more of the same tell nothing new here."""
STEPS: Final = 150
PATIENT: Final = 0.75
"""How often a task in whose turn it waits goes on waiting."""
COUNTS: Final = (
    "depth", "weight", "collected", "keys", "puts", "gets", "waiting_putters", "waiting_getters",
    "leases_out", "redelivered", "dead_letters", "stale", "senders", "receivers",
)  # fmt: skip


def differences(program: Program) -> list[str]:
    """The first step after which the channel is not what the reference is."""
    logging.disable()  # of every item that is given up, a line is logged
    try:
        return run(_Comparison(program).compare(), seed=None)
    finally:
        logging.disable(logging.NOTSET)


class _Doing(msgspec.Struct):
    """An operation that goes on over both."""

    op: Op
    model: Put | Take
    task: asyncio.Task[None] | None = None
    outcome: str = ""
    items: list[int] = []
    deliveries: list[int] = []
    replaced: list[int] = []
    gate: asyncio.Future[None] | None = None

    @property
    def leasing(self) -> bool:
        return self.op.do == "lease"


class _Actor:
    """A task of the program: its operations that are left, and the one that it is in."""

    def __init__(self, index: int, ops: list[Op], end: Any, number: int) -> None:
        self.index = index
        self.ops = ops
        self.end = end
        self.number = number
        self.doing: _Doing | None = None
        self.puts = 0


class _Comparison:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.rng = Random(program.seed or 0)
        self.model = Reference(program.capacity, program.max_weight, program.max_deliveries)

    async def compare(self) -> list[str]:
        program = self.program
        self.channel: Channel[Any] = new_channel(program)
        self.ends: list[Any] = []
        ends: dict[EndName, tuple[Any, int]] = {}
        for name in end_names(program):
            sends = name[0] == "send"
            end: Any = self.channel.sender.clone() if sends else self.channel.receiver.clone()
            number = self.model.open_sender() if sends else self.model.open_receiver()
            assert isinstance(number, int)
            ends[name] = end.open(), number
            self.ends.append(end)
        actors = [
            _Actor(index, [*_expanded(task.ops)], *ends[end_of(task)])
            for index, task in enumerate(program.tasks)
        ]
        try:
            return await self._steps(actors)
        finally:
            for actor in actors:
                if actor.doing is not None and actor.doing.task is not None:
                    actor.doing.task.cancel()
            await wait_all_blocked()
            for end in self.ends:
                end.close()

    async def _steps(self, actors: list[_Actor]) -> list[str]:
        for step in range(STEPS):
            going = [actor for actor in actors if actor.ops or actor.doing]
            if not going:
                return []
            actor = self.rng.choice(going)
            said = self._step(actor)
            await wait_all_blocked()
            self._settle_lags(actors)
            if found := [*self._compared(actors)]:
                return [f"step {step}, task {actor.index} {said}: {what}" for what in found]
            for one in actors:
                if (doing := one.doing) is not None and doing.outcome and doing.gate is None:
                    one.doing = None
        return []

    # ---- steps

    def _step(self, actor: _Actor) -> str:
        doing = actor.doing
        if doing is None:
            return self._begin(actor, actor.ops.pop(0))
        if doing.gate is not None:
            self._end_lease(doing)
            return f"ends its lease: {doing.op.ending}"
        if actor.ops and self.rng.random() < PATIENT and doing.op.cancel is None:
            return "waits"
        assert doing.task is not None
        doing.task.cancel()
        self.model.cancel(doing.model)
        return "is cancelled"

    def _begin(self, actor: _Actor, op: Op) -> str:
        said = f"begins {op!r}"
        if op.do in SENDING:
            number = item_number(actor.index, actor.puts)
            actor.puts += 1
            wait = op.do not in NOWAIT
            put = self.model.put(actor.number, number, op.key, op.weight, wait=wait)
            doing = _Doing(op, put)
            work = self._put(actor, op, make_item(self.program.payload, number, op.size))
        elif op.do in TAKING:
            batch = op.do in ("batch", "lease")
            target, least = (op.weight, op.at_least) if batch else (1, None)
            lease = op.do in LEASING
            doing = _Doing(op, self.model.take(
                actor.number, op.key, target, least, lease=lease, wait=op.do not in NOWAIT
            ))  # fmt: skip
            work = self._hold(actor, doing) if doing.leasing else self._take(actor, doing)
        else:
            self._do_at_once(actor, op)
            return said
        doing.task = asyncio.create_task(self._guard(doing, work))
        actor.doing = doing
        return said

    def _do_at_once(self, actor: _Actor, op: Op) -> None:
        try:
            if op.do == "clone":
                actor.end = actor.end.clone()
                self.ends.append(actor.end)
                sends = self.program.tasks[actor.index].side == "send"
                number = self.model.open_sender() if sends else self.model.open_receiver()
                assert isinstance(number, int)
                actor.number = number
            elif op.do == "close":
                actor.end.close()
                self.model.close(actor.number)
            elif op.do == "fail":
                actor.end.fail("the program says so")
                self.model.fail(actor.number)
        except ChannelError:
            pass  # a closed end, or a failed channel, cannot be cloned: there is nothing to compare

    def _end_lease(self, doing: _Doing) -> None:
        gate, doing.gate = doing.gate, None
        assert gate is not None
        assert isinstance(doing.model, Take)
        if doing.op.ending == "ack":
            gate.set_result(None)
            self.model.acknowledge(doing.model)
        elif doing.op.ending == "replace":
            gate.set_result(None)
            self.model.replace(doing.model, range(0, len(doing.items), 2))
        else:
            gate.set_exception(Spoilt())
            self.model.give_back(doing.model)

    def _settle_lags(self, actors: list[_Actor]) -> None:
        """The reference has no such get: it is a lease that is acknowledged at once."""
        for actor in actors:
            doing = actor.doing
            if doing is None or doing.op.do != "lag" or doing.model not in self.model.leases:
                continue
            assert isinstance(doing.model, Take)
            self.model.acknowledge(doing.model)
            version = doing.model.items[0] % VERSIONS
            self.model.stale += doing.op.weight + LAG - version > LAG

    # ---- the channel

    async def _guard(self, doing: _Doing, work: Any) -> None:
        current_party.set(f"operation {id(doing)}")
        try:
            await work
        except asyncio.CancelledError:
            doing.outcome = "cancelled"
            raise
        except Spoilt:
            return
        except ChannelError as error:
            doing.outcome = type(error).__name__
            return
        doing.outcome = "ok"

    async def _put(self, actor: _Actor, op: Op, item: Any) -> None:
        if op.do in NOWAIT:
            actor.end.put_nowait(item, key=op.key, weight=op.weight)
        else:
            await actor.end.put(item, key=op.key, weight=op.weight)

    async def _take(self, actor: _Actor, doing: _Doing) -> None:
        op, end = doing.op, actor.end
        if op.do == "batch":
            items = await end.get_batch(weight=op.weight, at_least=op.at_least, key=op.key)
        elif op.do in NOWAIT:
            items = [end.get_nowait(key=op.key)]
        elif op.do == "lag":
            found = await end.get_within_lag(current=op.weight + LAG, max_lag=LAG, key=op.key)
            assert isinstance(found, TooStale) == (found.lag > LAG)
            items = [found.item]
        else:
            items = [await end.get(key=op.key)]
        doing.items = [number_in(item) for item in items]
        doing.replaced = [times_replaced(item) for item in items]

    async def _hold(self, actor: _Actor, doing: _Doing) -> None:
        op = doing.op
        async with actor.end.lease(weight=op.weight, at_least=op.at_least, key=op.key) as items:
            doing.items = [number_in(item) for item in items]
            doing.deliveries = [*items.deliveries]
            doing.outcome = "ok"
            doing.replaced = [times_replaced(item) for item in items]
            doing.gate = gate = asyncio.get_running_loop().create_future()
            await gate
            for index in range(0, len(items), 2) if op.ending == "replace" else ():
                items.replace(index, replacement(items[index]))

    # ---- what is compared

    def _compared(self, actors: list[_Actor]) -> Iterator[str]:
        for actor in actors:
            if (doing := actor.doing) is None:
                continue
            wanted, got = doing.model.outcome, doing.outcome
            if wanted != got:
                found = f"{got or 'waits'}, not {wanted or 'waits'}"
                yield f"task {actor.index} in {doing.op!r}: {found}"
            elif isinstance(doing.model, Take) and got == "ok":
                if doing.items != doing.model.items:
                    yield f"task {actor.index} has {doing.items}, not {doing.model.items}"
                held = doing.gate is not None or not doing.leasing
                if held and doing.replaced != doing.model.replaced:
                    yield f"replaced {doing.replaced} times, not {doing.model.replaced}"
                if doing.gate is not None and doing.deliveries != doing.model.deliveries:
                    yield f"deliveries {doing.deliveries}, not {doing.model.deliveries}"
        seen = statistics_of(self.channel.queue)
        for name, wanted_count in self._counts().items():
            if getattr(seen, name) != wanted_count:
                yield f"{name} is {getattr(seen, name)}, not {wanted_count}"
        dead = [(number_in(one.item), one.deliveries) for one in self.channel.dead_letters]
        if dead != self.model.dead:
            yield f"dead letters {dead}, not {self.model.dead}"
        waiting = seen.waiting_putters + seen.waiting_getters
        if len(self.channel.waits()) != waiting:
            yield f"{len(self.channel.waits())} waits are reported, {waiting} are counted"

    def _counts(self) -> dict[str, int]:
        model = self.model
        lanes = model.lanes.values()
        found = (
            sum(len(lane.entries) for lane in lanes),
            sum(lane.weight for lane in lanes),
            sum(len(lane.collected) for lane in lanes),
            sum(key is not None for key in model.lanes),
            model.puts,
            model.gets,
            sum(len(lane.puts) for lane in lanes),
            sum(len(takes) for lane in lanes for takes in lane.turns),
            sum(len(lease.entries) for lease in model.leases),
            model.redelivered,
            len(model.dead),
            model.stale,
            len(model.senders),
            len(model.receivers),
        )
        return dict(zip(COUNTS, found, strict=True))


def _expanded(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        for _ in range(min(op.times, MOST_TIMES)):
            yield op
