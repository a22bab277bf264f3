"""Typed async channels: the only way that workers talk to one another."""

if __name__ != "rlinf_async.channels":
    raise ImportError(f"import this package as 'rlinf_async.channels', not as {__name__!r}")

from rlinf_async.channels.batching import BatchOps, BatchResizingIterator, BatchSizes
from rlinf_async.channels.ends import (
    Fresh,
    Key,
    LatestReceiver,
    LatestSender,
    Lease,
    Receiver,
    Sender,
    TooStale,
)
from rlinf_async.channels.errors import (
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFailed,
    ChannelFull,
    ConnectionLost,
    EndOfChannel,
    HandshakeFailed,
    HomeLost,
    ItemTooLarge,
    LeaseLost,
    MalformedFrame,
    NoReceivers,
    WireError,
    WrongItemType,
)
from rlinf_async.channels.latest import Latest, LatestStatistics
from rlinf_async.channels.local import Channel
from rlinf_async.channels.statistics import DeadLetter, KeyState, Statistics, current_party

__all__ = [
    "BatchOps",
    "BatchResizingIterator",
    "BatchSizes",
    "Channel",
    "ChannelClosed",
    "ChannelEmpty",
    "ChannelError",
    "ChannelFailed",
    "ChannelFull",
    "ConnectionLost",
    "DeadLetter",
    "EndOfChannel",
    "Fresh",
    "HandshakeFailed",
    "HomeLost",
    "ItemTooLarge",
    "Key",
    "KeyState",
    "Latest",
    "LatestReceiver",
    "LatestSender",
    "LatestStatistics",
    "Lease",
    "LeaseLost",
    "MalformedFrame",
    "NoReceivers",
    "Receiver",
    "Sender",
    "Statistics",
    "TooStale",
    "WireError",
    "WrongItemType",
    "current_party",
]
