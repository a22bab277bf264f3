"""A process that carries out tasks of one program after the other, as it is told over a pipe."""

from __future__ import annotations

import asyncio
import logging
import traceback
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec

from rlinf_async.channels.wire import ChannelClient, Direct, EndRef, Router, connect
from rlinf_async.channels.wire.adopting import Homes
from rlinf_async.channels.wire.direct import Use
from rlinf_async.channels.wire.session import link as distance
from tests.channels.model.items import item_type
from tests.channels.model.journal_file import FileJournal
from tests.channels.model.party import Party, SharedEnd
from tests.channels.model.program import EndName, Program, end_of
from tests.channels.model.sockets import SECRET, loop_factory

LEAST = 4_000
"""Bytes of the arrays that stay with their producer."""
SILENCE = 60.0
"""Seconds that a process may be silent: longer than the patience of a program."""


FAR_SECONDS = distance.FAR_SECONDS


class Order(msgspec.Struct):
    """owner -> worker: carry out the tasks of this place."""

    program: Program
    place: int
    address: str
    ends: list[tuple[EndName, EndRef]]
    journal: str
    kill_after: int | None
    transport: str


def serve_orders(pipe: Pipe) -> None:
    """Until the other side of the pipe is closed. An answer says what went wrong, if anything."""
    logging.disable()
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            with asyncio.Runner(loop_factory=loop_factory(order.program)) as runner:
                pipe.send(runner.run(_carry_out(order)))
        except Exception:
            pipe.send(traceback.format_exc())


def set_distance(transport: str) -> None:
    """Let every connection of this process count as far, or as it is."""
    distance.FAR_SECONDS = 0.0 if transport == "far" else FAR_SECONDS


async def _carry_out(order: Order) -> str:
    program, place = order.program, order.place
    set_distance(order.transport)
    kind = item_type(program.payload)  # torch may take longer than a connection may be silent
    connection = await connect(
        order.address, SECRET, name=f"process {place}", router=Router(), heartbeat_limit=SILENCE
    )
    use: Use = "auto" if order.transport == "direct" else "never"
    direct = await Direct.of_worker(
        connection, SECRET, name=f"process {place}", use=use, least=LEAST
    )
    client = ChannelClient(connection, direct)
    homes = Homes(SECRET, f"process {place}", heartbeat_limit=60)
    shared: dict[EndName, Any] = {}
    for name, ref in order.ends:
        if ref.home is None:
            shared[name] = SharedEnd(client.end(ref, kind))
        else:
            shared[name] = SharedEnd((await homes.adopt(ref)).make(kind))
    journal = FileJournal(order.journal, order.kill_after)
    parties = [
        Party(program, index, shared[end_of(task)], journal, here=False)
        for index, task in enumerate(program.tasks)
        if task.at == place
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for party in parties:
                group.create_task(party.run())
        return "lost its connection" if connection.closed else ""
    finally:
        connection.close()
        await connection.wait_closed()
        await homes.close()
        if direct is not None:
            await direct.close()
        journal.close()
