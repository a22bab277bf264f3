"""Inputs that mean something, where a fuzzer and the tests' mutations start from.

``python -m tests.fuzz.seeds FOLDER`` writes them, a folder for each target.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import encode
from rlinf_async.channels.wire.frames import DATA, LAST_TYPE, Flag, FrameType, outgoing
from rlinf_async.channels.wire.protocol import Announce, NotOpened, Opened, Place, Released, Retired
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.connection import Router
from rlinf_async.channels.wire.slab import PAGE
from tests.fuzz.pieces import piece
from tests.fuzz.pure import TYPES, Other, Plain, Sample

ARRAY, TENSOR = np.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)
VALUES: tuple[Any, ...] = (
    None, 1, -(2**40), 1.5, "text", b"bytes", [1, "two", None], {"a": {"b": [ARRAY]}},
    Sample("s", ARRAY, TENSOR, {"x": [np.ones(1, np.float32)]}, Sample("p", ARRAY, TENSOR)),
    Other((1.0, 2.0)), Plain(1.0, b"blob"), [Plain(0.0, b"")], {1, 2}, TENSOR, ARRAY,
    protocol.EndRef(1, "sender", "numbers"), np.zeros(2000, np.float32),
)  # fmt: skip
METAS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("channel.put", (None, 1, "w")),
    ("channel.put", ("key", 2, "w")),
    ("channel.put", (None, 1, "w", True)),
    ("channel.flush", ()),
    ("channel.get", (None, 1, None, "w", 1, False, 3)),
    ("channel.get", (None, 0, 0, "w", 0, False, 3)),
    ("channel.get", (None, 4, 1, "w", 1, True)),
    ("channel.get", (7, 1, None, "w", 1, True)),
    ("channel.state", (None,)),
    ("channel.clone", (-1, "w")),
    ("channel.close", ()),
    ("channel.stale", ()),
    ("channel.statistics", ()),
    ("channel.fail", ("a failure",)),
    ("latest.publish", ("w",)),
    ("latest.newer", (0, "w")),
    ("latest.close", ()),
)


def frames() -> Iterator[bytes]:
    for kind in FrameType:
        for body in (None, encode(VALUES[-1]), encode(VALUES[8]), Encoded(b"d" * 600_000)):
            message, _ = outgoing(kind, 7, b"head", body, DATA)
            stream = b""
            while (parts := message.next_frame()) is not None:
                stream += b"".join(parts)
            yield b"\x05" + stream[:8000]


def items() -> Iterator[bytes]:
    for which in range(len(TYPES)):
        for value in VALUES:
            travels = encode(value)
            apart = b"".join(piece(bytes(buffer)) for buffer in travels.buffers)
            yield bytes((which, len(travels.buffers))) + apart + travels.data


def parts() -> Iterator[bytes]:
    yield b"\x02" + b"\x03\x00\x01" + b"\x02\x00\x00" + b"\x01" + piece(b"array") + b"abcde"
    yield b"\x01" + b"\x05\x00\x00" + b"\x00" + b"abcde"


def handshake() -> Iterator[bytes]:
    yield b"\x00\x01" + bytes(4)
    yield b"\x01\x01" + bytes(4)
    yield b"\x00\x00" + bytes(4)
    for step in range(4):
        yield b"\x00\x01" + bytes(step) + b"\x02" + piece(b"\x00\x00more")
        yield b"\x00\x01" + bytes(step) + b"\x03\x05\x00\x01"


def memory() -> Iterator[bytes]:
    notices = (
        Announce(2, 3, bytes(32)), Opened(1), NotOpened(1, "no"), Released([1], [2]), Retired(1),
    )  # fmt: skip
    for notice in notices:
        yield b"\x01" + msgspec.msgpack.encode(notice)
    for places in (
        [Place(1, 1, PAGE, 100), None],
        [Place(1, 1, PAGE, 100), Place(1, 1, PAGE + 64, 100), Place(2, 1, 2 * PAGE, PAGE)],
        [Place(1, 1, 4 * PAGE, 1)],
    ):
        yield b"\x00" + piece(msgspec.msgpack.encode(places)) + b"\x01" + piece(b"beside")


def live() -> Iterator[bytes]:
    router = Router()
    ChannelServer(router)
    kinds = sorted(route.kind for route in router.routes.values())
    every = b""
    for number, (kind, rest) in enumerate(METAS, 1):
        which = kinds.index(kind)
        end = {"channel.put": 0, "latest.publish": 2, "latest.newer": 3}.get(kind, 1)
        end = 0 if kind in ("channel.fail", "channel.close") else end
        arguments = piece(b"".join(map(msgspec.msgpack.encode, rest)))
        body = piece(encode([1, "two"]).data) + b"\x00"
        head = bytes((which, end)) + arguments + bytes((len(rest),))
        for frame in (FrameType.REQUEST, FrameType.NOTICE):
            yield (one := bytes((_said(frame), number, Flag.BODY)) + head + body)
            every += one
    yield every
    yield from _credit(kinds)
    yield from _settled(kinds)
    for frame in FrameType:
        yield bytes((_said(frame), 1, 0, 255)) + piece(b"\x01" + bytes(7)) + piece(b"") + b"\x00"
    yield b"\x00" + piece(b"\xff" * 28)


def _settled(kinds: list[str]) -> Iterator[bytes]:
    """Items are put, delivered under a lease or not, and settled in every way."""
    request = bytes((_said(FrameType.REQUEST),))
    put = piece(b"".join(map(msgspec.msgpack.encode, (None, 1, "w")))) + b"\x03"
    puts = b"".join(
        request + bytes((number, Flag.BODY, kinds.index("channel.put"), 0)) + put
        + piece(b"\x01") + b"\x00"
        for number in (1, 2, 3)
    )  # fmt: skip
    for lease in (False, True):
        get = piece(b"".join(map(msgspec.msgpack.encode, (None, 2, 1, "w", 1, lease, 2)))) + b"\x07"
        asked = request + bytes((4, 0, kinds.index("channel.get"), 1)) + get + b"\x00"
        for outcome in range(6):
            settle = bytes((kinds.index("delivery.settle"), 1, 1, 4, 0, 1, outcome))
            taken = bytes((kinds.index("delivery.taken"), 1, 1, 4, 1, 2))
            notice = bytes((_said(FrameType.NOTICE), 0, 0))
            yield puts + asked + notice + settle + b"\x00" + notice + taken + b"\x00"


def _credit(kinds: list[str]) -> Iterator[bytes]:
    """Credit is asked for, spent, and returned."""
    notice, body = bytes((_said(FrameType.NOTICE), 0, Flag.BODY)), piece(b"\x01") + b"\x00"
    arguments = piece(b"".join(map(msgspec.msgpack.encode, (None, 1, "w", True)))) + b"\x04"
    want = bytes((kinds.index("channel.put"), 0)) + arguments + body
    puts = bytes((kinds.index("channel.transfer"), 0, 1, 0, 3, 3, 1, 3)) + body
    give = bytes((kinds.index("credit.return"), 0, 0, 3, 2)) + body
    asked = [bytes((_said(FrameType.REQUEST), number, Flag.BODY)) + want for number in (1, 2)]
    pause = b"\x00" + piece(b"")
    yield b"".join((*asked, pause, notice, puts, notice, give))
    yield b"".join((*asked, pause, notice, give, notice, puts))


def _said(kind: FrameType) -> int:
    """How an input says a frame's type; 0 stands for bytes that are no frame."""
    return kind - 1 or LAST_TYPE


EVERY = {
    "frames": frames, "items": items, "parts": parts, "handshake": handshake, "memory": memory,
    "live": live,
}  # fmt: skip


def main(folder: Path) -> None:
    for name, made in EVERY.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for seed in made():
            (folder / name / sha1(seed).hexdigest()).write_bytes(seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
