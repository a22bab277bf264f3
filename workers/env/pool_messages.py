"""Messages between an env worker and the processes of its pool.

::

    Begin   worker -> env process    begin an episode
    Act     worker -> env process    take a step
    Made    env process -> worker    the environment is made
    Shown   env process -> worker    the episode has begun, or the step is taken
    Broken  env process -> worker    the environment cannot be made, or it raised
    Ended   pool process -> worker   an env process has ended

Observations and actions are the bytes of one row of their arrays.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from rlinf_async.workers.env.slot import Episode

HEADER: Final = struct.Struct("<I")
"""before each message: its size in bytes"""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: begin an episode; with a seed, seed the environment too."""

    seed: int | None


class Act(msgspec.Struct, frozen=True, tag=True):
    """worker -> env process: take a step."""

    action: bytes
    dtype: str
    """of numpy"""


class Made(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: the environment is made."""


class Shown(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: what it shows, and what the step gave. See `Ready`."""

    ready_at: float
    observation: bytes
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    final_observation: bytes | None = None
    episode: Episode | None = None
    action_rewards: tuple[float, ...] = ()


class Broken(msgspec.Struct, frozen=True, tag=True):
    """env process -> worker: the text of the `EnvFailed` that it raised."""

    error: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """pool process -> worker: this env process has ended."""

    env: int
    status: int
    """exit code; of a signal its number, negative"""


ToEnv = Begin | Act
FromEnv = Made | Shown | Broken

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEnv | FromEnv | Ended) -> bytes:
    """The bytes of a message: header and body."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body
