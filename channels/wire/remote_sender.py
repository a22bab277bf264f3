"""A sender of a channel in another process: what it puts, and what it is told of that later.

::

    put --room was lent--> promised (see `promises`) --refused, or lost--> told at its next use
     \\--none-----------> asked, and waited for
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import TypeVar

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key, Sender
from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.itemtypes import check_key_and_weight
from rlinf_async.channels.saying import say
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.keeping import Keeping
from rlinf_async.channels.wire.outbox import TURN_BYTES
from rlinf_async.channels.wire.promises import Promises
from rlinf_async.channels.wire.protocol import Kept
from rlinf_async.channels.wire.purse import Purse
from rlinf_async.channels.wire.remote import Wire
from rlinf_async.channels.wire.remote_end import RemoteEnd

T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger(__name__)


class RemoteSender(RemoteEnd, Sender[T_contra]):
    """A sender of a channel in another process. It puts without asking where that has lent room."""

    __slots__ = ("__weakref__", "_error", "_keeping", "_promises", "_purse", "_told")

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._error: Exception | None = None
        self._told: type[Exception] | None = None
        self._promises = Promises.of(wire.connection)
        self._promises.join(number, self)
        self._purse = self._promises.purses.find(wire.queue, None)
        self._keeping = Keeping.over(wire.connection, wire.direct)

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        promises, purse = self._promises, self._purse
        if self._closed or self._error is not None:
            self._check()
        if key is not None or weight != 1:
            check_key_and_weight(self.channel_name, key, weight)
            purse = promises.purses.find(self._wire.queue, key)
        body = self._wire.encode(item)
        if body.buffers and self._keeping is not None:
            await self._put_kept(self._keeping, purse, body, weight)
            return
        if promises.fits(purse, body, weight):
            if promises.turn_due:
                await asyncio.sleep(0)  # it is sent, and room that was lent meanwhile is seen
                self._check()
                if not promises.fits(purse, body, weight):
                    await self._ask(purse, body, weight)
                    return
            promises.add(purse, self._number, weight, body.data)
            if self._told is not None:  # room was lent since, so somebody takes it again
                self._told = None
        elif body.buffers:
            await self._put_apart(purse, body, weight)
        else:
            await self._ask(purse, body, weight)

    async def _put_apart(self, purse: Purse, body: Encoded, weight: int) -> None:
        """Put an item with large arrays; without asking if they go by shared memory."""
        promises = self._promises
        if promises.copied >= TURN_BYTES:
            promises.copied = 0
            await asyncio.sleep(0)
            self._check()
        if promises.fits_apart(purse, body, weight) and promises.put_apart(
            purse, self._number, weight, body
        ):
            self._told = None
        else:
            await self._ask(purse, body, weight)

    async def _put_kept(self, keeping: Keeping, purse: Purse, whole: Encoded, weight: int) -> None:
        """Put an item whose large arrays stay here until somebody fetches them."""
        self._check()
        copied = await keeping.copy(whole)
        self._check()
        body, kept = keeping.keep(whole, copied=copied)
        if kept and not keeping.turn_due and self._promises.fits(purse, body, weight):
            self._promises.add(purse, self._number, weight, body.data, kept)
            self._told = None
            return
        try:
            await self._ask(purse, body, weight, kept)
        except BaseException:
            if kept is not None:
                keeping.give_up(kept)
            raise

    async def _ask(
        self, purse: Purse, body: Encoded, weight: int, kept: Kept | None = None
    ) -> None:
        """Put, and wait until it is done."""
        self._check()
        if not purse.kept:
            purse = self._promises.purses.find(purse.queue, purse.key)
            if purse.key is None:
                self._purse = purse
        party = current_party.get()
        put = protocol.Put(self._number, purse.key, weight, party, purse.wants, kept)
        purse.waiting += 1
        try:
            await self._wire.connection.request(
                "channel.put", put, body, reply=protocol.Nothing, on_channel=True
            )
            self._told = None
        except ChannelError as error:
            late, self._error, self._told = self._error, None, type(error)
            if late is not None:
                error.add_note(f"beside, of what was put before: {say(late)}")
            raise
        finally:
            purse.waiting -= 1
            purse.used = True
        purse.puts += 1

    async def flush(self) -> None:
        self._check()
        await self._promises.confirmed()
        self._check()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.raise_error()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as also:  # the block's own error is the first cause
            if error is None:
                raise
            error.add_note(f"beside, of what was put before: {say(also)}")

    def tell(self, error: Exception) -> bool:
        """Raise this at the next use; whether there will be one. It is told once why nothing is
        taken any more, not for each of the items that were under way then."""
        if self._told is type(error):
            return True
        if self._error is None:
            self._error = error
        return not self._closed

    def _check(self) -> None:
        self.raise_error()
        self.open()

    def raise_error(self) -> None:
        """What became of items that were put without asking, if that is an error."""
        error, self._error = self._error, None
        if error is not None:
            self._told = type(error)
            raise error

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None:
            log.error("a sender of channel %r was dropped: %s", self.channel_name, say(error))

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        raise self._wire.elsewhere("put_nowait", "await put(...)")

    def fail(self, error: BaseException | str) -> None:
        self.open()
        self._tell("channel.fail", protocol.Fail(self._number, say(error)))
        self.close()
