"""One queue's put and get, in one process: prints items per second as one line of JSON.

    python in_process.py ours | asyncio | anyio

Every queue goes through the same driver on the same kind of event loop (uvloop where it is
installed). Three shapes:

    pairs        one task puts an item and gets it back
    stream_1024  one task puts, another gets, capacity 1,024
    stream_64    the same, capacity 64
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

COUNT = 100_000
WARM_UP = 5_000


class Number(msgspec.Struct):
    """What is put."""

    value: int


class Queue(NamedTuple):
    """The two calls of a queue that are measured."""

    put: Callable[[Number], Awaitable[Any]]
    get: Callable[[], Awaitable[Number]]


def ours(capacity: int) -> Queue:
    from rlinf_async.channels import Channel

    channel = Channel(Number, name="numbers", capacity=capacity)
    return Queue(channel.sender.put, channel.receiver.get)


def of_asyncio(capacity: int) -> Queue:
    queue: asyncio.Queue[Number] = asyncio.Queue(capacity)
    return Queue(queue.put, queue.get)


def of_anyio(capacity: int) -> Queue:
    import anyio

    send, receive = anyio.create_memory_object_stream[Number](capacity)
    return Queue(send.send, receive.receive)


QUEUES = {"ours": ours, "asyncio": of_asyncio, "anyio": of_anyio}


async def pairs(queue: Queue, count: int) -> None:
    put, get = queue
    item = Number(1)
    for _ in range(count):
        await put(item)
        await get()


async def stream(queue: Queue, count: int) -> None:
    await asyncio.gather(_put_all(queue, count), _get_all(queue, count))


async def _put_all(queue: Queue, count: int) -> None:
    item = Number(1)
    for _ in range(count):
        await queue.put(item)


async def _get_all(queue: Queue, count: int) -> None:
    for _ in range(count):
        await queue.get()


async def rate(shape: Callable[[Queue, int], Awaitable[None]], queue: Queue) -> float:
    """Items per second."""
    await shape(queue, WARM_UP)
    start = time.perf_counter()
    await shape(queue, COUNT)
    return COUNT / (time.perf_counter() - start)


async def measure(make: Callable[[int], Queue]) -> dict[str, float]:
    return {
        "pairs": await rate(pairs, make(1024)),
        "stream_1024": await rate(stream, make(1024)),
        "stream_64": await rate(stream, make(64)),
    }


def event_loop() -> asyncio.AbstractEventLoop:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def main() -> None:
    with asyncio.Runner(loop_factory=event_loop) as runner:
        print(json.dumps(runner.run(measure(QUEUES[sys.argv[1]]))))


if __name__ == "__main__":
    main()
