"""``zmq.asyncio`` PUSH/PULL with msgspec over ipc, on uvloop.

    python of_zmq.py items | arrays

Small items keep ZeroMQ's own high-water mark of 1,000 messages. Arrays go as a second frame that
is not copied on either side, with a mark of 8: a thousand of them would not fit in memory.
"""

from __future__ import annotations

import multiprocessing
import sys

import msgspec
import numpy as np
import uvloop
import zmq  # pyright: ignore[reportMissingImports]
import zmq.asyncio  # pyright: ignore[reportMissingImports]

from benchmarks.channels import kit

ADDRESS = "ipc://items.ipc"


def pusher(mark: int | None = None) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    if mark is not None:
        socket.sndhwm = mark
    socket.connect(ADDRESS)
    return socket


def puller(mark: int | None = None) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
    if mark is not None:
        socket.rcvhwm = mark
    socket.bind(ADDRESS)
    return socket


async def push_items() -> None:
    socket, encode = pusher(), msgspec.msgpack.Encoder().encode
    while True:
        await socket.send(encode(kit.ITEM))


async def push_blocks(elements: int) -> None:
    socket, encode = pusher(kit.ARRAY_CAPACITY), msgspec.msgpack.Encoder().encode
    for number, values in enumerate(kit.sources(elements)):
        await socket.send_multipart([encode(number), values], copy=False)


async def items() -> dict[str, float]:
    decode = msgspec.msgpack.Decoder(kit.Item).decode
    with puller() as socket:

        async def take() -> None:
            decode(await socket.recv())

        return {"items_per_s": await kit.rate(take)}


async def arrays(name: str) -> dict[str, float]:
    decode = msgspec.msgpack.Decoder(int).decode
    with puller(kit.ARRAY_CAPACITY) as socket:

        async def take() -> None:
            header, body = await socket.recv_multipart(copy=False)
            values = np.frombuffer(body.buffer, np.float32)
            kit.touch(kit.Block(decode(header.buffer), values).values)

        rate = await kit.rate(take, every=1)
    return {f"gb_per_s_{name}": kit.gb_per_s(rate, kit.ARRAYS[name])}


def produce(elements: int) -> None:
    """The other process; no elements: small items."""
    uvloop.run(push_blocks(elements) if elements else push_items())


def measured(name: str) -> dict[str, float]:
    """One producer and one consumer; no name: small items."""
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=produce, args=(kit.ARRAYS.get(name, 0),), daemon=True)
    other.start()
    found = uvloop.run(arrays(name) if name else items())
    other.kill()
    other.join()
    return found


if __name__ == "__main__":
    if sys.argv[1] == "items":
        kit.done(**measured(""))
    else:
        kit.done(**measured("4mb"), **measured("64mb"))
