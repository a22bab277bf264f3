"""A sender of a channel in another process: its puts, and what becomes of them.

::

    put --on credit--> transferred (see `transfers`) --refused, or lost--> raised at its next use
     \\--without--> asks, and waits
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import TypeVar

from rlinf_async.channels.ends import Key, Sender
from rlinf_async.channels.errors import ChannelError, Failure, channel_failed, error_text
from rlinf_async.channels.statistics import current_party
from rlinf_async.channels.untyped import ONE, Encoded, check_key_and_weight
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.protocol import RetainedPayload
from rlinf_async.channels.wire.remote_latest import RemoteEnd, Wire
from rlinf_async.channels.wire.retained_payloads import RetainedPayloads
from rlinf_async.channels.wire.session.outbox import TURN_BYTES
from rlinf_async.channels.wire.transfers import Account, Transfers

T_contra = TypeVar("T_contra", contravariant=True)

log = logging.getLogger(__name__)


class RemoteSender(RemoteEnd, Sender[T_contra]):
    """A sender of a channel in another process. It puts without asking while it has credit."""

    __slots__ = (
        "__weakref__", "_account", "_error", "_failure", "_payloads", "_reported", "_transfers",
    )  # fmt: skip

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire, number)
        self._error: Exception | None = None
        self._failure: Failure | None = None
        """the error that this end has failed its channel with"""
        self._reported: type[Exception] | None = None
        self._account = self._transfers.accounts.find(wire.queue, None)
        self._payloads = RetainedPayloads.over(wire.connection, wire.direct)

    def _join(self) -> None:
        self._transfers = Transfers.of(self._wire.connection)
        self._transfers.join(self._number, self)

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        transfers, account = self._transfers, self._account
        if self._closed or self._error is not None:
            self._check()
        if key is not None or weight is not ONE:
            check_key_and_weight(self.channel_name, key, weight)
            account = transfers.accounts.find(self._wire.queue, key)
        wire = self._wire
        if not wire.fits(item):
            wire.check(item)
        body = wire.pack(item)
        if body.buffers and self._payloads is not None:
            await self._put_retained(self._payloads, account, body, weight)
            return
        if transfers.turn_due:
            await asyncio.sleep(0)  # it is sent, and credit that was granted meanwhile is seen
            self._check()
        if transfers.add(account, self._number, weight, body):
            self._reported = None  # granted since: items are taken again
        elif body.buffers:
            await self._put_large(account, body, weight)
        else:
            await self._ask(account, body, weight)

    async def _put_large(self, account: Account, body: Encoded, weight: int) -> None:
        """Put an item with large arrays: on credit if they go by shared memory or the owner is far,
        else by a request."""
        transfers = self._transfers
        if transfers.copied >= TURN_BYTES:
            transfers.copied = 0
            await asyncio.sleep(0)
            self._check()
        if transfers.fits_large(account, body, weight) and transfers.put_large(
            account, self._number, weight, body
        ):
            self._reported = None
        else:
            await self._ask(account, body, weight)

    async def _put_retained(
        self, payloads: RetainedPayloads, account: Account, whole: Encoded, weight: int
    ) -> None:
        """Put an item whose payload stays here until a consumer fetches it."""
        self._check()
        copied = await payloads.copy(whole)
        self._check()
        body, retained = payloads.retain(whole, copied=copied)
        if (
            retained
            and not payloads.turn_due
            and self._transfers.add(account, self._number, weight, body, retained)
        ):
            self._reported = None
            return
        if retained is None:
            await self._put_large(account, body, weight)
            return
        try:
            await self._ask(account, body, weight, retained)
        except BaseException:
            payloads.give_up(retained)
            raise

    async def _ask(
        self, account: Account, body: Encoded, weight: int, retained: RetainedPayload | None = None
    ) -> None:
        """Put, and wait until it is done."""
        self._check()
        if not account.registered:
            account = self._transfers.accounts.find(account.queue, account.key)
            if account.key is None:
                self._account = account
        party = current_party.get()
        put = protocol.Put(self._number, account.key, weight, party, account.wants, retained)
        account.waiting += 1
        try:
            await self._wire.connection.request(
                "channel.put", put, body, reply=protocol.Nothing, on_channel=True
            )
            self._reported = None
        except ChannelError as error:
            late, self._error, self._reported = self._error, None, type(error)
            if late is not None:
                error.add_note(f"beside, of what was put before: {error_text(late)}")
            raise
        finally:
            account.waiting -= 1
            account.used = True
        account.puts += 1

    async def flush(self) -> None:
        self._check()
        await self._transfers.confirmed()
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
            error.add_note(f"beside, of what was put before: {error_text(also)}")

    def report(self, error: Exception) -> bool:
        """Raise this at the next use; whether there will be one. The reason why the channel takes
        nothing any more is raised once, not for each item that was in transit."""
        if self._reported is type(error):
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
            self._reported = type(error)
            raise error

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None:
            log.error(
                "a sender of channel %r was dropped: %s", self.channel_name, error_text(error)
            )
        super().__del__()

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        raise self._wire.elsewhere("put_nowait", "await put(...)")

    def fail(self, error: BaseException | str) -> None:
        if self._failure is not None:
            return
        self.open()
        text = error_text(error)
        self._tell("channel.fail", protocol.Fail(self._number, text))
        self._failure = text, error if isinstance(error, BaseException) else None
        self.close()

    def _closed_error(self) -> ChannelError:
        if self._failure is not None:
            return channel_failed(self.channel_name, self._failure)
        return super()._closed_error()
