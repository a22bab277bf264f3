"""A receiver of a channel in another process: single items by its links, batches by asking."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from rlinf_async.channels.delivery import Outcome
from rlinf_async.channels.ends import NO_REPLACEMENTS, Key, Lease, Receiver, checked_least
from rlinf_async.channels.errors import ConnectionLost, LeaseLost, MalformedFrame, error_text
from rlinf_async.channels.remote_payload import RemotePayload
from rlinf_async.channels.statistics import current_party
from rlinf_async.channels.untyped import Encoded, check_key_and_weight
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.codec import join, split
from rlinf_async.channels.wire.direct import attach, fetch_all
from rlinf_async.channels.wire.receiver_links import (
    TURN_ITEMS,
    ReceiverLink,
    ReceiverLinks,
    task_number,
)
from rlinf_async.channels.wire.remote_latest import RemoteEnd

T_co = TypeVar("T_co", covariant=True)
DELIVERED: Any = protocol.Delivered | int


class RemoteReceiver(RemoteEnd, Receiver[T_co]):
    """A receiver of a channel in another process."""

    __slots__ = ("_link", "_links")

    def _join(self) -> None:
        self._links = ReceiverLinks.of(self._wire.connection)
        self._link = self._find(None)

    async def get(self, *, key: Key | None = None) -> T_co:
        if self._closed:
            self.open()
        if key is not None:
            check_key_and_weight(self.channel_name, key, 1)
        link = self._link if key is None else self._find(key)
        if link.run >= TURN_ITEMS:
            link.run = 0
            await asyncio.sleep(0)  # what was taken is said, and what was asked for is heard
            self.open()
        if not link.registered:
            link = self._find(key)
        number, index, item = link.items.popleft() if link.items else await link.next()
        while item.__class__ is Encoded:
            if item.buffers.__class__ is not RemotePayload or await self._is_here(
                link, number, index, item
            ):
                item = self._value(number, index, item)
                break
            number, index, item = link.items.popleft() if link.items else await link.next()
        link.mark_taken(number, index)
        taken: T_co = item
        return taken

    def _value(self, number: int, index: int, part: Encoded) -> Any:
        """An item that arrived by itself, decoded."""
        try:
            return self._wire.decode(part)
        except MalformedFrame as error:
            self._links.settle([(number, index, 1)], Outcome.REJECTED, error)
            raise self._wire.unreadable(error) from error

    async def _is_here(self, link: ReceiverLink, number: int, index: int, part: Encoded) -> bool:
        """Fetch the arrays of an item; False if they are lost. Cancelled, it goes back."""
        wire = self._wire
        try:
            lost = await fetch_all(wire.connection, wire.direct, [part])
        except BaseException:
            link.return_part((number, index, part))
            raise
        if lost:
            self._links.settle([(number, index, 1)], Outcome.LOST)
        return not lost

    def _find(self, key: Key | None) -> ReceiverLink:
        """The link as it is known now: one that was forgotten is empty, and what is prefetched for
        it would be out of reach of a recall."""
        link = self._links.find(self.channel_name, self._number, key, self._wire.decode_list)
        if key is None:
            self._link = link
        return link

    def close(self) -> None:
        if not self._closed:
            self._links.close(self._number)
            super().close()

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that gets ahead")

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        number, items, _ = await self._deliver(weight, at_least, key)
        self._links.taken(number, 0, len(items))
        return items

    async def _deliver(
        self,
        weight: int,
        at_least: int | None,
        key: Key | None,
        *,
        lease: bool = False,
        confirmed: bool = True,
    ) -> tuple[int, list[T_co], list[int]]:
        """Wait for a delivery: its number, its items, and how often each was handed out. It is not
        settled; one with an item that cannot be used is."""
        self.open()
        check_key_and_weight(self.channel_name, key, 1)
        checked_least(self.channel_name, weight, at_least)
        self._links.return_items(self._number, key)
        while True:
            get = protocol.Get(
                self._number, key, weight, at_least, current_party.get(),
                task_number(self.channel_name), lease,
                taken=self._links.take_unreported(), confirmed=confirmed,
            )  # fmt: skip
            connection = self._wire.connection
            answer = await connection.ask(
                "channel.get", get, reply=DELIVERED, on_channel=True, withdraw=not get.taken
            )
            if connection.closed:  # it has gone back, and others may have it
                raise connection.lost_as(f"connection to {connection.peer!r} was lost")
            delivered, number = answer.meta, answer.number
            if isinstance(delivered, int):
                parts, counts = [answer.body or Encoded(b"")], []
            else:
                parts, counts = split(delivered.sizes, answer.body), delivered.deliveries
                if delivered.payloads and not await self._are_here(
                    number, parts, delivered.payloads
                ):
                    continue
            return number, self._decoded(number, parts), counts

    async def _are_here(
        self, number: int, parts: list[Encoded], left: list[protocol.PayloadRef]
    ) -> bool:
        """Fetch the arrays of a delivery; False if some are lost, and the other items returned."""
        wire, whole = self._wire, (number, 0, len(parts))
        try:
            attach(parts, left)
            lost = await fetch_all(wire.connection, wire.direct, parts)
        except BaseException:
            self._links.settle([whole], Outcome.RETURNED)
            raise
        if not lost:
            return True
        self._links.settle([(number, index, 1) for index in lost], Outcome.LOST)
        self._links.settle([whole], Outcome.RETURNED)
        return False

    def _decoded(self, number: int, parts: list[Encoded]) -> list[Any]:
        """The items of a delivery. One that cannot be read goes to the dead letters, the others
        back.

        Raises:
            MalformedFrame: of that item.
        """
        found: list[Any] = []
        for index, part in enumerate(parts):
            try:
                found.append(self._wire.decode(part))
            except MalformedFrame as error:
                self._links.settle([(number, index, 1)], Outcome.REJECTED, error)
                self._links.settle([(number, 0, len(parts))], Outcome.RETURNED)
                raise self._wire.unreadable(error) from error
        return found

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None, *, confirmed: bool = True
    ) -> tuple[protocol.Range, Lease[T_co]]:
        number, items, counts = await self._deliver(
            weight, at_least, key, lease=True, confirmed=confirmed
        )
        return (number, 0, len(items)), Lease(items, counts, self._wire.encode)

    async def _acknowledge(
        self, delivery: protocol.Range, replacements: Mapping[int, Encoded] = NO_REPLACEMENTS
    ) -> None:
        connection = self._wire.connection
        sizes, body = join(list(replacements.values())) if replacements else ([], None)
        settle = protocol.Settle(
            [delivery], Outcome.TAKEN, replaced=list(replacements), sizes=sizes
        )
        try:
            await connection.request("delivery.settle", settle, body, reply=protocol.Nothing)
        except (asyncio.CancelledError, GeneratorExit):
            if not connection.closed:  # the block has ended: it may have been heard, or not
                connection.notify("delivery.settle", settle, body)
            raise
        except ConnectionLost as error:
            raise LeaseLost(
                f"a lease on channel {self.channel_name!r} was taken back before it was "
                f"acknowledged, or nobody knows: the connection to {connection.peer} was lost"
            ) from error

    def _consume(self, delivery: protocol.Range) -> None:
        self._links.taken(*delivery)

    def _put_back(self, delivery: protocol.Range, error: BaseException) -> None:
        self._links.settle([delivery], Outcome.FAILED, error_text(error))

    def _count_stale(self) -> None:
        if not self._wire.connection.closed:
            self._wire.connection.notify("channel.stale", protocol.End(self._number))
