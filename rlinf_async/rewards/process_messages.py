"""The messages between a scoring process and its owner.

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
    """Settings of the scoring process."""

    owner: int
    """process id of the owner; the scoring process ends with it"""
    memory_bytes: int
    """memory limit; 0: none"""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Import these verifiers now."""

    verifiers: list[str]


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Judge one answer."""

    verifier: str
    answer: Answer


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The verifiers are loaded, or one cannot be."""

    error: str = ""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The verifier is loaded and runs from now on."""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The outcome."""

    outcome: Outcome


ToProcess = Start | Load | Judge
FromProcess = Loaded | Begun | Judged

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToProcess | FromProcess) -> bytes:
    """The bytes of a message: header and body."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return HEADER.pack(len(body)) + body
