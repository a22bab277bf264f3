"""What a scoring process and its owner say to one another.

::

    owner    Start                     once, first
    owner    Load(verifiers)   ->  Loaded(error)
    owner    Judge(...)        ->  Begun, Judged(outcome)        or Judged alone: it cannot load it

Each message is a frame: its length in 4 bytes, then MessagePack. No pickle, and decoded by type.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from rlinf_async.messages.language import Outcome
from rlinf_async.rewards.answer import Answer

MAX_FRAME: Final = 256 * 1024 * 1024
"""bytes"""
HEADER: Final = struct.Struct("!I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """How to be a scoring process."""

    owner: int
    """process id: when it goes, so does the scoring process"""
    memory_bytes: int
    """at most; 0: as much as there is"""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import these verifiers now."""

    verifiers: list[str]


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Judge one answer."""

    verifier: str
    answer: Answer


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """All verifiers are there, or why not."""

    error: str = ""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The verifier is loaded and runs from now on."""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """What came out."""

    outcome: Outcome


ToProcess = Start | Load | Judge
FromProcess = Loaded | Begun | Judged

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToProcess | FromProcess) -> bytes:
    """The message as it is written."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return HEADER.pack(len(body)) + body
