"""The limits: a bare uvloop Unix socket between two processes, and memcpy in one.

    python raw.py items | echo | memcpy

``items``: length-prefixed MessagePack of the same message, each encoded and decoded, written
many at a time. ``echo``: 64 bytes there and back, between two cores. ``memcpy``: one thread copies
arrays of each size, between many of them (out of the caches) and between two (in them, where they
fit).
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.channels import kit

PATH = "raw.sock"
TOGETHER = 256
"""messages that are written at once"""
COPIED = 1 << 30
"""bytes on each side of the copies out of the caches"""


class Writing(asyncio.Protocol):
    """Writes messages for as long as somebody reads."""

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        self.transport = transport
        self.resume_writing()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        asyncio.get_running_loop().call_soon(self.write)

    def write(self) -> None:
        if self.paused or self.transport.is_closing():
            return
        encode = msgspec.msgpack.encode
        frames = [encode(kit.ITEM) for _ in range(TOGETHER)]
        self.transport.write(b"".join(len(one).to_bytes(4, "big") + one for one in frames))
        asyncio.get_running_loop().call_soon(self.write)


class Reading(asyncio.Protocol):
    """Decodes messages and counts them."""

    def __init__(self, enough: Callable[[int], None]) -> None:
        self.enough = enough
        self.decode = msgspec.msgpack.Decoder(kit.Item).decode
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        data, start, count = self.rest + data, 0, 0
        while len(data) - start >= 4:
            end = start + 4 + int.from_bytes(data[start : start + 4], "big")
            if end > len(data):
                break
            self.decode(memoryview(data)[start + 4 : end])
            start, count = end, count + 1
        self.rest = data[start:]
        self.enough(count)


class Echo(asyncio.Protocol):
    """Writes back what it reads."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Asking(Echo):
    """One question at a time."""

    answer: asyncio.Future[bytes]

    async def ask(self, question: bytes) -> bytes:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(question)
        return await self.answer

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)


def serve(protocol: type[asyncio.Protocol], ready: Event) -> None:
    """The other process, on the first core."""
    kit.own_core(0)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_unix_server(protocol, PATH)
        ready.set()
        await server.serve_forever()

    uvloop.run(main())


async def items() -> dict[str, float]:
    loop = asyncio.get_running_loop()
    counted: list[int] = []
    await loop.create_unix_connection(lambda: Reading(counted.append), PATH)
    await asyncio.sleep(kit.WARM_UP)
    counted.clear()
    start = loop.time()
    await asyncio.sleep(kit.SECONDS)
    return {"items_per_s": sum(counted) / (loop.time() - start)}


async def echo() -> dict[str, float]:
    kit.own_core(1)
    _, asking = await asyncio.get_running_loop().create_unix_connection(Asking, PATH)
    question = b"x" * 64
    return await kit.latencies(lambda: asking.ask(question))


def memcpy() -> dict[str, float]:
    found = {}
    for name, elements in kit.ARRAYS.items():
        count = COPIED // (4 * elements)
        sources = [np.full(elements, number, np.float32) for number in range(count)]
        targets = [np.full(elements, -1, np.float32) for _ in range(count)]  # touched
        found[f"gb_per_s_{name}"] = _copied(elements, sources, targets)
        found[f"in_cache_gb_per_s_{name}"] = _copied(elements, sources[:1], targets[:1])
    return found


def _copied(elements: int, sources: list[np.ndarray], targets: list[np.ndarray]) -> float:
    pairs = itertools.cycle(zip(targets, sources, strict=True))
    return kit.gb_per_s(kit.blocking_rate(lambda: np.copyto(*next(pairs)), every=1), elements)


def main(what: str) -> None:
    if what == "memcpy":
        kit.done(**memcpy())
        return
    protocol, measure = {"items": (Writing, items), "echo": (Echo, echo)}[what]
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=serve, args=(protocol, ready), daemon=True)
    other.start()
    ready.wait()
    measured = uvloop.run(measure())
    other.kill()
    other.join()
    kit.done(**measured)


if __name__ == "__main__":
    main(sys.argv[1])
