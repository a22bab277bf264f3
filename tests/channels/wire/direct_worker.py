"""A process of its own whose large arrays go past the owner, and that does as it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import msgspec
import numpy as np

from rlinf_async.channels import Receiver, Sender
from rlinf_async.channels.wire import (
    ChannelClient,
    Connection,
    Direct,
    EndRef,
    Router,
    connect,
)
from rlinf_async.channels.wire.frames import Message
from tests.channels.wire.harness import SECRET
from tests.channels.wire.memory_worker import SIZE, Numbered, check


async def main(address: str, ref: EndRef, what: str) -> None:
    """Connect, and do it."""
    connection = await connect(address, SECRET, name=ref.kind, router=Router(), heartbeat_limit=60)
    listen = ["tcp://127.0.0.1:0"] if ref.kind == "sender" else []
    direct = await Direct.open(SECRET, name=ref.kind, listen=listen, least=8 * SIZE)
    end = ChannelClient(connection, direct).end(ref, Numbered)
    verb, _, how = what.partition(" ")
    if isinstance(end, Sender):
        with end:
            for number in range(int(verb)):
                await end.put(Numbered(number, np.full(SIZE, number, np.int64)))
            await end.flush()
            if how == "and stay":
                await asyncio.Event().wait()
    elif isinstance(end, Receiver):
        await take(end, verb)
    connection.close("done")
    await connection.wait_closed()
    await direct.close()
    assert direct.retained_bytes == 0


async def take(receiver: Receiver[Numbered], how: str) -> None:
    """Take all; or die while something is held, or while it is fetched."""
    if how == "hold":
        async with receiver.lease(weight=2) as batch:
            for one in batch:
                check(one)
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "fetch":
        die_in_the_midst_of_what_comes_from("sender")
        async with receiver.lease(weight=2):
            raise AssertionError("it was fetched")
    async for one in receiver:
        check(one)


def die_in_the_midst_of_what_comes_from(peer: str) -> None:
    read = Connection.received

    def read_and_die(connection: Connection, count: int, messages: Iterator[Message]) -> None:
        read(connection, count, messages)
        if connection.peer == peer and connection.received_bytes > SIZE:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Connection, "received", read_and_die)  # noqa: B010  # of every connection


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=EndRef), sys.argv[3]))
