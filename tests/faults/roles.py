"""What the processes of a schedule do: the owner of the channel, its producers, its consumers."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    ConnectionLost,
    EndOfChannel,
    LeaseLost,
    Receiver,
    Sender,
    Statistics,
    WireError,
)
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Connection,
    Direct,
    EndRef,
    Router,
    connect,
    serve,
)
from rlinf_async.channels.wire.session.endpoint import Timeouts
from tests.faults.journal import Did, Page
from tests.faults.plan import HEARTBEAT, LEAST, PATIENCE, Plan, Role

SECRET: Final = b"a secret for schedules, 32 bytes"
LOST: Final = 3
"""Exit status of a process that was told that its connection is lost."""
MAX_DELIVERIES: Final = 50


class Item(msgspec.Struct):
    """Its number, and elements that all say it."""

    number: int
    values: NDArray[np.uint32]

    def check(self) -> None:
        if not (self.values == self.number).all():
            raise AssertionError(f"item {self.number} arrived with {np.unique(self.values)}")


class Spoilt(Exception):
    """What a holder raises now and then: its items go back."""


class Started(msgspec.Struct):
    """owner -> stage: connect here."""

    path: str
    ends: dict[str, EndRef]


class Closed(msgspec.Struct):
    """owner -> stage: all is over, and this is what it saw."""

    statistics: Statistics
    drained: list[int]
    """items that were left when every consumer had gone"""
    dead: list[int]
    lost: list[str]
    """peers that were lost, and why"""


class Order(msgspec.Struct):
    """stage -> worker: be this."""

    role: Role
    path: str
    end: EndRef
    seed: int


async def own(control: socket.socket, plan: Plan, folder: str) -> None:
    """Own the channel until the stage says that everybody has gone."""
    logging.disable()
    router = Router()
    channels = ChannelServer(router)
    channel = Channel(Item, name="items", capacity=plan.capacity, max_deliveries=MAX_DELIVERIES)
    lost: list[str] = []
    loop = asyncio.get_running_loop()

    gone = asyncio.Event()

    def note(connection: Connection, reason: str) -> None:
        gone.set()
        lost.append(f"{connection.peer}: {reason}")

    times: Timeouts = {"heartbeat_limit": HEARTBEAT}
    if plan.direct:
        times["patience"] = PATIENCE
    async with await serve(
        "tcp://127.0.0.1:0" if plan.direct else f"{folder}/s",
        SECRET, router=router, name="owner", on_disconnect=note,
        **times,
    ) as server:  # fmt: skip
        refs: dict[str, EndRef] = {}
        for role in plan.roles:
            end: Any = channel.sender if role.kind == "sender" else channel.receiver
            refs[role.name] = channels.end_ref(end, role.name)
        with channel.receiver.clone("the stage") as rest:
            control.setblocking(False)
            await loop.sock_sendall(control, _line(Started(server.address, refs)))
            said = b""
            while b"over" not in said:
                said += await loop.sock_recv(control, 4096)
                *names, said = said.split(b" ")
                for name in names:  # it will not come back
                    channels.release(refs[name.decode()].number)
            while server.connections:  # what was killed at the end of TCP has some patience left
                await gone.wait()
                gone.clear()
            drained: list[int] = []
            with suppress(EndOfChannel):
                while True:
                    drained.append((await rest.get()).number)
        dead = [letter.item.number for letter in channel.dead_letters]
        closed = Closed(statistics_of(channel.queue), drained, dead, lost)
        await loop.sock_sendall(control, _line(closed))


async def work(control: socket.socket, order: Order, page: Page, plan: Plan) -> int:
    """Be a producer or a consumer; the exit status."""
    logging.disable()
    try:
        connection = await connect(
            order.path, SECRET, name=order.role.name, router=Router(), heartbeat_limit=60
        )
    except WireError:
        return LOST
    if connection.transport is None:  # the owner has died in the moment after the handshake
        return LOST
    found: socket.socket = connection.transport.get_extra_info("socket")
    socket.send_fds(control, [b"s"], [found.fileno()])
    direct: Direct | None = None
    if plan.direct:
        listen = ["tcp://127.0.0.1:0"] if order.role.kind == "sender" else []
        direct = await Direct.open(SECRET, name=order.role.name, listen=listen, least=LEAST)
    end = ChannelClient(connection, direct).end(order.end, Item)
    try:
        rng = Random(order.seed)
        if isinstance(end, Sender):
            await produce(end, order.role, page, plan, rng)
        elif isinstance(end, Receiver):
            await (
                hold(end, order.role, page, rng)
                if order.role.lease
                else take(end, order.role, page, rng)
            )
    except ConnectionLost:
        return LOST
    connection.close("done")
    await connection.wait_closed()
    if direct is not None:
        await direct.close()
    return 0


async def produce(sender: Sender[Item], role: Role, page: Page, plan: Plan, rng: Random) -> None:
    """Put, and now and then wait until all that was put is confirmed."""
    waiting: list[int] = []
    try:
        with sender:
            for number in range(role.first, role.stop):
                page.write(Did.PUTTING, number)
                waiting.append(number)
                await sender.put(Item(number, np.full(plan.array_bytes // 4, number, np.uint32)))
                if rng.random() < 0.2 or number == role.stop - 1:
                    await sender.flush()
                    for confirmed in waiting:
                        page.write(Did.PUT, confirmed)
                    waiting.clear()
    except ConnectionLost:
        for number in waiting:
            page.write(Did.TOLD, number)
        raise


async def take(receiver: Receiver[Item], role: Role, page: Page, rng: Random) -> None:
    async for item in receiver:
        page.write(Did.GOT, item.number)
        item.check()
        if role.slow:  # others arrive meanwhile
            await asyncio.sleep(rng.random() * 0.002)


async def hold(receiver: Receiver[Item], role: Role, page: Page, rng: Random) -> None:
    while True:
        held: list[int] = []
        try:
            async with receiver.lease(weight=role.lease, at_least=1) as batch:
                for item, deliveries in zip(batch, batch.deliveries, strict=True):
                    page.write(Did.HELD, item.number, deliveries)
                    item.check()
                    held.append(item.number)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.001)
                if rng.random() < 0.1:
                    raise Spoilt
                for number in held:
                    page.write(Did.ACKNOWLEDGING, number)
        except EndOfChannel:
            return
        except Spoilt:
            continue
        except LeaseLost:
            for number in held:
                page.write(Did.NOT_ACKNOWLEDGED, number)
            continue
        for number in held:
            page.write(Did.ACKNOWLEDGED, number)


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
