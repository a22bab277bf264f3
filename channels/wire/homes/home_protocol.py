"""The messages between a home, the process that has made channels there, and those who use them."""

from __future__ import annotations

import msgspec

from rlinf_async.channels.encoded import Form
from rlinf_async.channels.statistics import Statistics
from rlinf_async.channels.waitfor import Wait
from rlinf_async.channels.wire.links.protocol import EndKind


class Create(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: make a queue. Its items are known to those who put and take them."""

    name: str
    capacity: int
    max_weight: int | None
    max_deliveries: int
    form: Form


class Created(msgspec.Struct, array_like=True, frozen=True):
    """The answer."""

    queue: int


class Open(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: open an end, which I call ``number``."""

    queue: int
    kind: EndKind
    number: int
    holder: str


class Adopt(msgspec.Struct, array_like=True, frozen=True):
    """user -> home: I use the end that the maker calls ``number``."""

    queue: int
    number: int


class Adopted(msgspec.Struct, array_like=True, frozen=True):
    """The answer: what to call it."""

    end: int


class End(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: the channel ends, with this error if there is one."""

    queue: int
    error: str | None = None


class Look(msgspec.Struct, array_like=True, frozen=True):
    """maker -> home: what is seen of the queues that I have made?"""


class ChannelSeen(msgspec.Struct, frozen=True):
    """One of them."""

    queue: int
    statistics: Statistics
    waits: list[Wait]
    dead_letter: str = ""
    """why the last one was given up"""


class Seen(msgspec.Struct, frozen=True):
    """The answer."""

    channels: list[ChannelSeen]
