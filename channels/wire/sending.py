"""Putting into channels of another process: the senders, and what becomes of their items.

::

    put --credit left--> collected --next write--> unconfirmed --Grant--> confirmed, or refused
     \\--none, or one waits--> asks, and waits

An item with large arrays is not collected: it goes by itself, its arrays by shared memory. To an
owner on another host it asks, unless a round trip takes longer than a copy of them: then they are
copied, and go through the socket.

Invariants:

* all senders of a key spend from one account, and none spends while another one's put waits, so
  nothing is overtaken;
* what was collected goes, in the data lane, before whatever else is said later in that lane: a
  lease that is settled, the end of a sender, a flush;
* that an item was refused, or may be lost, is raised at its sender's next put, flush or close; if
  the sender is closed, it is logged.

Credit stays with this process while nobody else wants it: until the owner recalls it, or this
process puts under too many other keys.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections import Counter, deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec

from rlinf_async.channels.encoded import ONE, Encoded, check_key_and_weight
from rlinf_async.channels.ends import Key, Sender
from rlinf_async.channels.errors import ChannelError, Failure, channel_failed, error_text
from rlinf_async.channels.statistics import current_party
from rlinf_async.channels.wire import protocol
from rlinf_async.channels.wire.frames import (
    CHUNK_BYTES,
    DATA,
    MAX_BUFFERS,
    SHARE_BYTES,
    Flag,
    FrameType,
)
from rlinf_async.channels.wire.owner_credit import FAR_ARRAYS_BYTES
from rlinf_async.channels.wire.protocol import (
    Credit,
    Flush,
    Grant,
    Nothing,
    Refused,
    RetainedPayload,
    Run,
    Transfer,
)
from rlinf_async.channels.wire.remote_ends import RemoteEnd, Wire
from rlinf_async.channels.wire.retained_payloads import RetainedPayloads
from rlinf_async.channels.wire.session.connection import Connection, Request
from rlinf_async.channels.wire.session.outbox import TURN_BYTES
from rlinf_async.channels.wire.session.requests import head_of, rebuild
from rlinf_async.channels.wire.session.streams import Linger

MAX_KEY: Final = 128
"""Characters of a key for which credit is granted."""
MAX_ACCOUNTS: Final = 256
"""Keys for which a process has credit, over one connection; beyond it, those it does not use go
back."""
SWEEP_SECONDS: Final = 0.05
"""Where there are too many keys, credit that was not spent for so long goes back."""


class Account:
    """The credit of this process for one key of a channel."""

    __slots__ = (
        "grantable",
        "items",
        "key",
        "puts",
        "queue",
        "registered",
        "used",
        "waiting",
        "weight",
    )

    def __init__(self, queue: int, key: Key | None) -> None:
        self.queue = queue
        self.key = key
        self.registered = False
        """whether it is this key's account; one that is not never has credit"""
        self.grantable = queue > 0 and (key is None or len(str(key)) <= MAX_KEY)
        self.items = 0
        self.weight: float = 0
        """weight left; of no use without items: the owner takes it back when the last item comes"""
        self.waiting = 0
        """puts that asked and wait for their answer"""
        self.puts = 0
        """number of puts that have asked the owner"""
        self.used = True

    @property
    def wants(self) -> bool:
        """Whether it is worth granting credit to the account."""
        return self.registered and self.puts > 0 and self.grantable

    def empty(self) -> Credit:
        """Take out what is left."""
        weight = None if self.weight == float("inf") else int(self.weight if self.items else 0)
        credit = Credit(self.queue, self.key, self.items, weight)
        self.items, self.weight = 0, 0
        return credit


class Accounts:
    """The accounts of one connection: what the owner at its other side has granted, by key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.registered: dict[tuple[int, Key | None], Account] = {}
        """accounts by channel and key; no more than `MAX_ACCOUNTS`"""
        self._swept_at = self._loop.time()
        connection.peer_requests.own.add_sync("credit.recall", Credit, self._recalled)

    def find(self, queue: int, key: Key | None) -> Account:
        """The account of this key, forgotten when it has no credit: see `Account.registered`."""
        account = self.registered.get((queue, key))
        if account is None:
            account = Account(queue, key)
            full = len(self.registered) >= MAX_ACCOUNTS
            if full and self._loop.time() - self._swept_at >= SWEEP_SECONDS:
                self.sweep()
                full = len(self.registered) >= MAX_ACCOUNTS
            if not full:
                self.registered[queue, key] = account
                account.registered = True
        return account

    def fill(self, credits: Iterable[Credit]) -> None:
        """Add credit that was granted."""
        for credit in credits:
            account = self.find(credit.queue, credit.key)
            if not account.items:
                account.weight = 0
            account.items += credit.items
            account.weight = (
                float("inf") if credit.weight is None else account.weight + credit.weight
            )
            account.used = True
            if not account.registered:  # there are too many keys
                self._return(account)

    def sweep(self) -> None:
        """Return what was not used since the last time, and forget its keys."""
        self._swept_at = self._loop.time()
        for at, account in list(self.registered.items()):
            if account.used or account.waiting:
                account.used = False
                continue
            if account.items:
                self._return(account)
            account.puts = 0
            account.registered = False
            del self.registered[at]

    def close(self) -> None:
        """The connection is lost: no credit is left."""
        for account in self.registered.values():
            account.items = 0

    def _recalled(self, request: Request[Credit]) -> None:
        credit = request.meta
        account = self.registered.get((credit.queue, credit.key)) or Account(
            credit.queue, credit.key
        )
        self._return(account)  # the owner waits for it, even if nothing is left
        account.puts = 0

    def _return(self, account: Account) -> None:
        self._connection.notify("credit.return", account.empty())


log = logging.getLogger(__name__)
MAX_ITEM_BYTES: Final = 32 * 1024
"""Bytes of an item that is put on credit; larger ones ask."""
FRAME_BYTES: Final = CHUNK_BYTES // 4
FRAME_ITEMS: Final = 128
"""Items that are sent together, before the loop has a turn."""
FRAME_RETAINED: Final = 64
"""Most items per frame whose arrays stay with the producer."""
FRAME_MOST: Final = 4 * FRAME_ITEMS
"""Many tasks that put in one turn may collect more; no message has more than these, or than so many
changes of key, sender or weight as `FRAME_ITEMS`: its head is bounded."""
MAX_UNCONFIRMED: Final = 1024**2
"""Bytes that may be unconfirmed; a put that would exceed it asks."""
FAR_UNCONFIRMED: Final = 16 * 1024**2
"""Bytes that may be unconfirmed where the connection is `far`."""
_NOTICE, _SHARED = FrameType.NOTICE, int(Flag.SHARED)  # the enums are slow to ask

_open: set[Transfers] = set()


class _Frame(msgspec.Struct, gc=False):
    """Items that were sent together and are not confirmed."""

    items: int
    size: int
    by_end: dict[int, int]


class Transfers:
    """Everything that this process has put over one connection on credit. See `of`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = connection.outbox
        self.accounts = Accounts(connection)
        self.turn_due = False
        """whether so much was collected that it should be sent"""
        self.copied = 0
        """bytes of arrays that were put, since others in this loop had a turn"""
        self._senders: WeakValueDictionary[int, RemoteSender[Any]] = WeakValueDictionary()
        self._runs: list[tuple[Account, int, int]] = []
        self._counts: list[int] = []
        self._data: list[bytes] = []
        self._retained: list[RetainedPayload] = []
        self._size = 0
        self._unconfirmed: deque[_Frame] = deque()
        self._unconfirmed_bytes = 0
        self._most = MAX_UNCONFIRMED
        self._far = False
        self._linger = Linger(connection, self._open_items, self._hurry, "items were not confirmed")
        connection.peer_requests.own.add_sync("credit.grant", Grant, self._granted)
        connection.add_linger(self._linger)
        connection.on_close(self._lost, first=True)

    @classmethod
    def of(cls, connection: Connection) -> Transfers:
        """The transfers of this connection."""
        return connection.attached(cls) or connection.attach(cls(connection))

    # ---- for senders

    def join(self, end: int, sender: RemoteSender[Any]) -> None:
        """Tell this sender of what becomes of its items."""
        self._senders[end] = sender

    def add(
        self,
        account: Account,
        end: int,
        weight: int,
        body: Encoded,
        retained: RetainedPayload | None = None,
    ) -> bool:
        """Put this on credit, with the next write at the latest; False if it has to ask."""
        data = body.data
        if (
            account.items <= 0
            or account.waiting
            or weight > account.weight
            or body.buffers
            or len(data) > MAX_ITEM_BYTES
            or self._unconfirmed_bytes + self._size >= self._most
        ):
            return False
        account.items -= 1
        account.weight -= weight
        account.used = True
        collected, runs = self._data, self._runs
        if runs and runs[-1] == (account, end, weight):
            self._counts[-1] += 1
        else:
            if not runs:
                self._outbox.collect(self._send)
            runs.append((account, end, weight))
            self._counts.append(1)
        if retained is not None:
            self._retained.append(RetainedPayload(len(collected), retained.number, retained.sizes))
        collected.append(data)
        self._size = size = self._size + len(data)
        if size >= FRAME_BYTES:
            self._send()
        elif (count := len(collected)) >= FRAME_ITEMS:
            self.turn_due = True
            if count >= FRAME_MOST or len(self._runs) >= FRAME_ITEMS:
                self._send()
        if retained is not None and len(self._retained) >= FRAME_RETAINED:
            self._send()
        return True

    def fits_large(self, account: Account, body: Encoded, weight: int) -> bool:
        """Whether credit suffices for this item, whose large arrays are shared or copied."""
        return (
            account.items > 0
            and not account.waiting
            and weight <= account.weight
            and self._unconfirmed_bytes + self._size < self._most
            and len(body.data) <= FAR_ARRAYS_BYTES
            and len(body.buffers) <= MAX_BUFFERS
            and (self._far or sum(map(len, body.buffers)) >= SHARE_BYTES)
        )

    def put_large(self, account: Account, end: int, weight: int, body: Encoded) -> bool:
        """Put an item with large arrays on credit, copying them; False where they can be neither
        shared nor copied."""
        travels, flags = self._connection.share(body), _SHARED
        if travels is None:
            if not self._far or sum(map(len, body.buffers)) > FAR_ARRAYS_BYTES:
                return False
            travels, flags = Encoded(body.data, [*map(bytearray, body.buffers)]), 0
        self._send()
        run = Run(account.queue, end, account.key, weight, 1)
        size = len(travels.data) if flags else travels.nbytes
        self._notify(Transfer([run], [len(body.data)]), travels, size, {end: 1}, flags)
        account.items -= 1
        account.weight -= weight
        account.used = True
        self.copied += body.nbytes
        return True

    async def confirmed(self) -> None:
        """Return once all that was put is in its place, or refused.

        Raises:
            ConnectionLost: some of it may be lost.
        """
        if self._data or self._unconfirmed:
            await self._connection.request("channel.flush", Flush(), reply=Nothing)

    # ---- what goes out

    def _send(self) -> None:
        if not self._data or self._connection.closed:
            return
        data, runs, counts = self._data, self._runs, self._counts
        self._data, self._runs, self._counts = [], [], []
        retained, self._retained = self._retained, []
        by_end: dict[int, int] = {}
        found: list[Run] = []
        for (account, end, weight), count in zip(runs, counts, strict=True):
            found.append(Run(account.queue, end, account.key, weight, count))
            by_end[end] = by_end.get(end, 0) + count
        body = b"".join(data) if len(data) > 1 else data[0]
        self._size = 0
        self.turn_due = False
        transfer = Transfer(found, [*map(len, data)], retained)
        self._notify(transfer, Encoded(body), len(body), by_end)

    def _notify(
        self, transfer: Transfer, body: Encoded, size: int, by_end: dict[int, int], flags: int = 0
    ) -> None:
        head = head_of("channel.transfer", transfer)
        self._outbox.send(_NOTICE, 0, head, body, DATA, flags=flags, what="channel.transfer")
        if not self._unconfirmed:
            _open.add(self)
        self._unconfirmed.append(_Frame(len(transfer.sizes), size, by_end))
        self._unconfirmed_bytes += size

    # ---- what comes in

    def _granted(self, request: Request[Grant]) -> None:
        grant = request.meta
        if grant.credits:
            self._far = self._connection.far
            self._most = FAR_UNCONFIRMED if self._far else MAX_UNCONFIRMED
            self.accounts.fill(grant.credits)
        for refused in grant.refused:
            self._refused(refused)
        self._confirm(grant.handled)

    def _confirm(self, handled: int) -> None:
        while handled > 0 and self._unconfirmed:
            frame = self._unconfirmed.popleft()
            handled -= frame.items
            self._unconfirmed_bytes -= frame.size
        if not self._unconfirmed and not self._data:
            _open.discard(self)
            if self._linger.then is not None:
                self._linger.settled()

    def _refused(self, refused: Refused) -> None:
        error = rebuild(refused.error)
        error.add_note(f"{refused.count} items of this sender were under way, and are not put")
        self._report(refused.end, refused.count, error)

    def _report(self, end: int, count: int, error: Exception) -> None:
        sender = self._senders.get(end)
        if sender is not None and sender.report(error):
            return
        log.error(
            "%d items that were put over the connection to %s are lost, and their "
            "sender is closed: %s", count, self._connection.peer, error,
        )  # fmt: skip

    # ---- the end

    def _hurry(self) -> None:
        self._send()
        self._connection.notify("channel.flush", Flush())

    def _open_items(self) -> int:
        return len(self._data) + sum(frame.items for frame in self._unconfirmed)

    def _lost(self, connection: Connection, reason: str) -> None:
        self._linger.stop()
        self.accounts.close()
        by_end: Counter[int] = Counter()
        for frame in self._unconfirmed:
            by_end.update(frame.by_end)
        for (_, end, _), count in zip(self._runs, self._counts, strict=True):
            by_end[end] += count
        self._unconfirmed.clear()
        self._data.clear()
        _open.discard(self)
        for end, count in by_end.items():
            error = connection.lost_as(
                f"connection to {connection.peer!r} was lost: {reason}; {count} items of this "
                "sender were not confirmed: they may be lost"
            )
            self._report(end, count, error)

    def report(self) -> None:
        """The process ends; say what is not known to have arrived."""
        if count := self._open_items():
            log.error(
                "this process ends before %s has confirmed %d items that were put: await "
                "sender.flush(), or close the connection and wait for it",
                self._connection.peer, count,
            )  # fmt: skip


@atexit.register
def _report_unconfirmed() -> None:
    for transfers in list(_open):
        transfers.report()


T_contra = TypeVar("T_contra", contravariant=True)


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
