"""An owner on one host and a worker on another talk over whatever cable there is.

    python -m tests.net.far_talk [--reset]        run in the worker's namespace, by `Hosts.run`

With ``--reset`` the sockets are cut again and again meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from rlinf_async.channels import Channel
from rlinf_async.channels.wire import Connection, Router, connect
from tests.channels.wire.harness import SECRET, wired
from tests.net import over_hosts
from tests.net.cutter import Cutter
from tests.net.kit import Far, arrays_both_ways, small_talk


async def main(reset: bool) -> None:
    async with wired(address=over_hosts.BetweenHosts.address) as owner:
        connection = await connect(owner.server.address, SECRET, name="worker", router=Router())
        far = Far(owner, Cutter("", []), connection)
        cutting = asyncio.create_task(cut_often(connection)) if reset else None
        begun = time.perf_counter()
        await small_talk(far)
        await arrays_both_ways(far, 40)
        seconds = time.perf_counter() - begun
        if cutting is not None:
            cutting.cancel()
        print(f"round trip {await round_trip(far):.4f} s")
        print(f"everything arrived once, in {seconds:.1f} s, {connection.reconnection.cuts} cuts")
        connection.close()
        await connection.wait_closed()


async def round_trip(far: Far) -> float:
    """Seconds of the fastest of five questions."""
    sender = far.owner.sender(Channel(int, name="numbers"), far.connection)
    found: list[float] = []
    for _ in range(5):
        begun = time.perf_counter()
        await sender.statistics()
        found.append(time.perf_counter() - begun)
    return min(found)


async def cut_often(connection: Connection) -> None:
    """Reset the worker's socket each time that some bytes went through."""
    before = 0
    while True:
        await asyncio.sleep(0.001)
        link = connection.link
        enough = connection.received_bytes >= before + 50_000
        if enough and link is not None and link.transport is not None:
            before = connection.received_bytes
            link.transport.abort()


if __name__ == "__main__":
    uvloop.run(main("--reset" in sys.argv))
