"""A process of its own that uses ends of the tests' channels, as it is told on its command line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from rlinf_async.channels import Receiver, Sender
from rlinf_async.channels.wire import ChannelClient, EndRef, Router, connect
from tests.channels.wire.harness import SECRET


async def main(path: str, ref: EndRef, what: str) -> None:
    """Connect, and do it."""
    connection = await connect(path, SECRET, name=what, router=Router(), heartbeat_limit=60)
    end = ChannelClient(connection).end(ref, int)
    if isinstance(end, Receiver):
        await consume(end, what)
    elif isinstance(end, Sender):
        count, _, leave = what.partition(" and ")
        for number in range(int(count)):
            await end.put(number)
        if leave:
            return
    connection.close("done")
    await connection.wait_closed()


async def consume(receiver: Receiver[int], what: str) -> None:
    """Take by lease, and die, stop, or go on."""
    async with receiver.lease(weight=3) as batch:
        if what == "die holding":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stop holding":
            os.kill(os.getpid(), signal.SIGSTOP)
        assert len(batch) == 3
    if what == "die getting":
        getting = asyncio.create_task(receiver.get_batch(weight=1000))
        await asyncio.sleep(0)
        await receiver.statistics()  # asked after the batch, so the owner knows of that now
        os.kill(os.getpid(), signal.SIGKILL)
        await getting


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=EndRef), sys.argv[3]))
