"""What reads bytes without a socket, given any bytes: it reads them, or refuses them by name.

Each target takes one input, and raises if something else happens.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_async.channels import HandshakeFailed, MalformedFrame, WrongItemType
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import Decoder, encode, split
from rlinf_async.channels.wire.frames import HEADER, MAX_FRAME_BYTES, MessageReader
from rlinf_async.channels.wire.protocol import Announce, decode_notice
from rlinf_async.channels.wire.session.link import MAX_MESSAGE, Handshake
from rlinf_async.channels.wire.session.requests import UNREADABLE
from rlinf_async.channels.wire.sharing import Borrowing
from rlinf_async.channels.wire.slab import PAGE, Slab, make_slab
from tests.fuzz.pieces import Pieces

SECRET: Final = bytes(range(32))


class Sample(msgspec.Struct):
    """Arrays and tensors, and what can stand around them."""

    name: str
    tokens: NDArray[np.int64]
    logprobs: torch.Tensor
    extra: dict[str, list[NDArray[np.float32]]] = {}
    parent: Sample | None = None


class One(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One of two."""

    value: int


class Other(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The other of two."""

    values: tuple[float, ...]


@dataclass
class Plain:
    """No Struct."""

    when: float
    blob: bytes


TYPES: Final[tuple[Any, ...]] = (
    Any, Sample, Sample | None, One | Other, Plain, list[Plain], dict[str, Sample], int, str,
    bytes, set[int], torch.Tensor, NDArray[np.float32 | np.int64], protocol.EndRef,
)  # fmt: skip
DECODERS: Final = tuple(map(Decoder, TYPES))


class Broken(AssertionError):
    """What was fuzzed did what it must never do."""


def frames(data: bytes) -> None:
    """A stream of bytes, cut anywhere. No more is held than has arrived."""
    pieces = Pieces(data)
    step = pieces.byte() * 16 + 1
    stream = pieces.rest()
    reader, arrived, given = MessageReader(), 0, 0
    try:
        for start in range(0, len(stream), step):
            part = stream[start : start + step]
            arrived += len(part)
            for message in reader.feed(part):
                given += len(message.head) + (message.body.nbytes if message.body else 0)
            if given > arrived or reader.held > MAX_FRAME_BYTES + HEADER.size:
                raise Broken(f"{given} bytes given and {reader.held} held of {arrived}")
    except MalformedFrame:
        return


def items(data: bytes) -> None:
    """An item of some type, its arrays beside it. What could be read can be sent on and read."""
    pieces = Pieces(data)
    decoder = DECODERS[pieces.byte() % len(DECODERS)]
    buffers = [bytearray(pieces.some()) for _ in range(pieces.byte() % 4)]
    try:
        found = decoder.decode(Encoded(pieces.rest(), buffers))
    except MalformedFrame:
        return
    try:
        travels = encode(found)
    except WrongItemType as error:  # a dtype that can be read but not sent is no harm
        if "dtype" in str(error) or "surrogates" in str(error):
            return
        raise
    again = encode(decoder.decode(Encoded(travels.data, [*map(bytearray, travels.buffers)])))
    if not isinstance(found, set) and again.data != travels.data:
        raise Broken(f"{found!r} became other bytes when it was sent twice")


def parts(data: bytes) -> None:
    """A batch of items: sizes that add up part it exactly."""
    pieces = Pieces(data)
    sizes = [(pieces.number(2), pieces.byte()) for _ in range(pieces.byte() % 8)]
    buffers = [bytearray(pieces.some()) for _ in range(pieces.byte() % 4)]
    body = Encoded(pieces.rest(), buffers)
    try:
        found = split(sizes, body)
    except MalformedFrame:
        return
    joined = [buffer for one in found for buffer in one.buffers]
    if b"".join(one.data for one in found) != body.data or joined != buffers:
        raise Broken(f"{sizes} parted {body!r} otherwise")


def handshake(data: bytes) -> None:
    """Somebody between a client and a server: only what nobody changed is believed."""
    pieces = Pieces(data)
    version = 1 + pieces.byte() % 2
    client = Handshake("client", SECRET, "client", 1)
    server = Handshake("server", SECRET if pieces.byte() % 4 else bytes(32), "server", version)
    honest = True
    for here, there in (client, server), (server, client), (client, server), (server, client):
        sent = here.take_outgoing()
        passed = _tampered(sent, pieces)
        honest &= passed.startswith(sent)  # what follows may stand behind the handshake
        try:
            there.feed(passed)
        except HandshakeFailed:
            return
        if there.done and not (honest and version == 1):
            raise Broken(f"a {there.role} believed a changed handshake")
    if len(client._received) + len(server._received) > len(data) + MAX_MESSAGE:
        raise Broken("a handshake holds more than has arrived")


def _tampered(sent: bytes, pieces: Pieces) -> bytes:
    """What arrives instead of what was sent."""
    what = pieces.byte() % 4
    if what == 1:
        return pieces.some()
    if what == 2:
        return sent + pieces.some()
    if what == 3 and sent:
        changed = bytearray(sent)
        changed[pieces.number(2) % len(sent)] ^= pieces.byte()
        return bytes(changed)
    return sent


@cache
def _own_slab(pid: int) -> Slab:
    return make_slab(4 * PAGE)


def memory(data: bytes) -> None:
    """What a peer says of shared memory: nothing outside of what was announced is looked at."""
    pieces = Pieces(data)
    slab = _own_slab(os.getpid())
    said: list[object] = []
    borrowing = Borrowing(said.append, lambda number, poisoned: said.append(number))
    borrowing.announced(Announce(1, slab.fd, slab.token), os.getpid())
    if pieces.byte() % 2:
        with suppress(MalformedFrame, *UNREADABLE):
            notice = decode_notice(pieces.rest())
            if isinstance(notice, Announce):
                borrowing.announced(notice, os.getpid())
        return
    table, beside = pieces.some(), [bytearray(pieces.some()) for _ in range(pieces.byte() % 3)]
    with suppress(MalformedFrame, *UNREADABLE):
        found = borrowing.restore(Encoded(b"", [memoryview(table), *beside]))
        for buffer in found.buffers:
            bytes(buffer)
