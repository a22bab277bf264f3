"""What the ends of one channel of another process share: how its items are sent and read."""

from __future__ import annotations

from typing import Any

from rlinf_async.channels.away import PayloadLost
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ChannelError, MalformedFrame, WrongItemType
from rlinf_async.channels.itemtypes import check_item, item_class
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.asking import Answer
from rlinf_async.channels.wire.codec import split
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.fetching import attach, fetch_all
from rlinf_async.channels.wire.items import ItemCodec
from rlinf_async.channels.wire.protocol import EndRef


class Wire:
    """A channel of another process, as this one sees it."""

    def __init__(
        self, connection: Connection, ref: EndRef, item_type: Any, direct: Direct | None = None
    ) -> None:
        self.connection = connection
        self.direct = direct
        self.queue = ref.queue
        self.channel_name = ref.channel
        self.item_type = item_type
        self.item_class = item_class(item_type)
        codec = ItemCodec(item_type, ref.form)
        self.decode = codec.decode
        # Of a union that is numbered, the codec must see what class an item has.
        self._packs = not ref.form.numbered
        self._encode = codec.encode_packed if self._packs else codec.encode

    def encode(self, item: object) -> Encoded:
        """The item as it travels.

        Raises:
            WrongItemType: it is not of the channel's type, or a part of it cannot travel.
        """
        if item.__class__ is not self.item_class:
            packed = check_item(item, self.item_type, self.item_class, self.channel_name)
            if self._packs:
                item = packed
        try:
            return self._encode(item)
        except WrongItemType as error:
            raise WrongItemType(f"channel {self.channel_name!r}: {error}") from error

    async def here(self, answer: Answer[protocol.Taken]) -> list[Encoded] | None:
        """The items of an answer with all their arrays; None if some are lost, and the others back
        in the channel, as they are if this is cancelled."""
        parts = split(answer.meta.sizes, answer.body)
        if not answer.meta.left:
            return parts
        try:
            attach(parts, answer.meta.left)
            lost = await fetch_all(self.connection, self.direct, parts)
        except BaseException:
            answer.give_back()
            raise
        if lost is None:
            return parts
        answer.refuse(
            lost, PayloadLost("it was not fetched before its producer was lost"), lost=True
        )
        return None

    def decode_each(self, answer: Answer[protocol.Taken], parts: list[Encoded]) -> list[Any]:
        """The items of an answer, which counts as taken if all of them can be read. Of one that
        cannot be, the owner is told: it goes to the dead letters, the others back to the head.

        Raises:
            MalformedFrame: an item is not of the channel's type.
        """
        found: list[Any] = []
        for index, part in enumerate(parts):
            try:
                found.append(self.decode(part))
            except MalformedFrame as error:
                answer.refuse(index, error)
                raise self.unreadable(error) from error
        answer.take()
        return found

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
