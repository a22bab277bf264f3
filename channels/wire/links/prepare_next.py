"""The next item with large arrays is made ready while its receiver is busy with the one before.

A get is then answered at once: its arrays lie in shared memory already. Nothing else changes by it:
until it is asked for, the item stays where it is, and is taken as it was put.

::

    answered with a large item --next turn--> the head of its key is copied --get--> answered
"""

from __future__ import annotations

import asyncio
from typing import Final

from rlinf_async.channels.channel_state import ChannelState
from rlinf_async.channels.delivery import Entry
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ItemTooLarge, WrongItemType
from rlinf_async.channels.key_queue import KeyQueue
from rlinf_async.channels.remote_payload import remote_payload_of
from rlinf_async.channels.wire.frames.framing import MAX_DATA_BYTES, check_sizes
from rlinf_async.channels.wire.frames.messages import SHARE_BYTES
from rlinf_async.channels.wire.session.connection import Connection

READY_BYTES: Final = 16 * 1024**2
"""Larger items are copied when they are sent: they would hold others up, and take memory, for what
may not be asked for."""
CANNOT_TRAVEL: Final = (WrongItemType, ItemTooLarge)
"""What is wrong with an item that no other process will ever get: it is buried."""


def encoded_entry(entry: Entry, channel: ChannelState) -> Encoded:
    """An item as it travels; made now if it was not made ready.

    Raises:
        WrongItemType: it cannot travel.
        ItemTooLarge: no message can hold it.
    """
    ready: Encoded | None = entry.ready
    if ready is not None:
        entry.ready = None  # what comes back is not kept twice
        return ready
    item = entry.item
    if item.__class__ is Encoded:
        return item
    assert channel.encode is not None  # it is, once another process has an end
    body = channel.encode(item)
    if body.buffers or len(body.data) > MAX_DATA_BYTES:
        check_sizes(0, len(body.data), body.buffers, "an item")
    return body


def prepare_next(connection: Connection, queue: KeyQueue, sent: Encoded) -> None:
    """A receiver of this key was sent an item: make the next one ready, if it may be as large."""
    if sent.buffers and _worth_it(sent):
        asyncio.get_running_loop().call_soon(_prepare, connection, queue)


def _prepare(connection: Connection, queue: KeyQueue) -> None:
    if connection.closed or not queue.entries:
        return
    entry = queue.entries[0]
    if entry.ready is not None or remote_payload_of(entry.item) is not None:
        return
    try:
        body = encoded_entry(entry, queue.channel)
    except CANNOT_TRAVEL:  # the get that asks for it raises that
        return
    if _worth_it(body) and connection.prepare(body) and body is not entry.item:
        entry.ready = body


def _worth_it(body: Encoded) -> bool:
    return SHARE_BYTES <= sum(map(len, body.buffers)) <= READY_BYTES
