"""What the ends of one channel of another process share: how its items are sent and read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ChannelError, MalformedFrame, WrongItemType
from rlinf_async.channels.itemtypes import check_item, item_class
from rlinf_async.channels.round_trip import round_trip_check
from rlinf_async.channels.wire.direct.direct import Direct
from rlinf_async.channels.wire.items.item_codec import ItemCodec
from rlinf_async.channels.wire.links.confirmed_notices import ConfirmedNotices
from rlinf_async.channels.wire.links.protocol import End, EndRef
from rlinf_async.channels.wire.links.receiver_links import ReceiverLinks
from rlinf_async.channels.wire.session.connection import Connection


class Wire:
    """A channel of another process, as this one sees it."""

    def __init__(
        self, connection: Connection, ref: EndRef, item_type: Any, direct: Direct | None = None
    ) -> None:
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self.direct = direct
        self.queue = ref.queue
        self.form = ref.form
        self.home = ref.home
        self.channel_name = ref.channel
        self.item_type = item_type
        self.item_class = item_class(item_type)
        self._round_trip = round_trip_check(item_type, ref.channel, ref.form)
        codec = ItemCodec(item_type, ref.form)
        self.decode, self.decode_list = codec.decode, codec.decode_list
        self.pack = codec.encode
        """An item that fits, as it travels."""
        self.fits = self._round_trip.fits
        """True for an item that certainly arrives as what it is: see `look_closely`."""

    def close_later(self, end: int) -> None:
        """Close an end that was dropped, in whichever thread that was noticed."""
        self.later(partial(self._close, end))

    def later(self, call: Callable[[], object]) -> None:
        """Call this in the connection's loop, from whichever thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _close(self, end: int) -> None:
        if not self.connection.closed:
            if (links := self.connection.attached(ReceiverLinks)) is not None:
                links.close(end)
            ConfirmedNotices.of(self.connection).send("channel.close", End(end))

    def encode(self, item: object) -> Encoded:
        """The item as it travels.

        Raises:
            WrongItemType: it is not of the channel's type, or a part of it cannot travel.
        """
        if not self.fits(item):
            self.look_closely(item)
        try:
            return self.pack(item)
        except WrongItemType as error:
            raise WrongItemType(f"channel {self.channel_name!r}: {error}") from error

    def look_closely(self, item: object) -> None:
        """Refuse an item that does not fit.

        Raises:
            WrongItemType: it is not of the channel's type, or a part of it cannot travel.
        """
        check_item(item, self.item_type, self.item_class, self.channel_name)
        self._round_trip.check(item)

    def decode_value(self, body: Encoded | None) -> Any:
        """The value of a `Latest`.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        try:
            return self.decode(body or Encoded(b""))
        except MalformedFrame as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: MalformedFrame) -> MalformedFrame:
        """An item is not of the channel's type."""
        return MalformedFrame(
            f"channel {self.channel_name!r} of {self.connection.peer}: {error}; whoever puts it "
            "must declare the same type for this channel"
        )

    def elsewhere(self, what: str, instead: str) -> ChannelError:
        return ChannelError(
            f"channel {self.channel_name!r} lives in another process ({self.connection.peer}): "
            f"{what} cannot know its state; use {instead}"
        )
