"""Items that are put on credit: transfers, and what becomes of them.

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
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

import msgspec

from rlinf_async.channels.ends import Key
from rlinf_async.channels.untyped import Encoded
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
from rlinf_async.channels.wire.session.answers import PeerRequests, Request
from rlinf_async.channels.wire.session.connection import Linger
from rlinf_async.channels.wire.session.requests import head_of, rebuild

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.connection import Connection


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
        self.waiting = 0
        """puts that asked and wait for their answer"""
        self.puts = 0
        """that asked"""
        self.used = True

    @property
    def wants(self) -> bool:
        """Whether it is worth granting credit to."""
        return self.registered and self.puts > 0 and self.grantable

    def spend(self, weight: int) -> None:
        """Put one item on credit."""
        self.items -= 1
        self.weight -= weight
        self.used = True
        if not self.items and self.weight != float("inf"):
            self.weight = 0  # of no use without items; the owner takes it back, too

    def empty(self) -> Credit:
        """Take out what is left."""
        weight = None if self.weight == float("inf") else int(self.weight)
        credit = Credit(self.queue, self.key, self.items, weight)
        self.items, self.weight = 0, 0
        return credit


class Accounts:
    """The accounts of one connection: what the owner at its other side has granted, by key."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.registered: dict[tuple[int, Key | None], Account] = {}
        """by channel and key; no more than `MAX_ACCOUNTS`"""
        self._swept_at = self._loop.time()
        PeerRequests.of(connection).own.add_sync("credit.recall", Credit, self._recalled)

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
        """So much more was granted."""
        for credit in credits:
            account = self.find(credit.queue, credit.key)
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


class ReportsPuts(Protocol):
    """A sender, which raises what became of its items."""

    def report(self, error: Exception) -> bool:
        """Raise this at the sender's next use; whether there may be one."""
        ...


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
        self._senders: WeakValueDictionary[int, ReportsPuts] = WeakValueDictionary()
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
        PeerRequests.of(connection).own.add_sync("credit.grant", Grant, self._granted)
        connection.add_linger(self._linger)
        connection.on_close(self._lost, first=True)

    @classmethod
    def of(cls, connection: Connection) -> Transfers:
        """The transfers of this connection."""
        return connection.attached(cls) or connection.attach(cls(connection))

    # ---- for senders

    def join(self, end: int, sender: ReportsPuts) -> None:
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
        account.spend(weight)
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
        self._notify(Transfer([run], [len(body.data)]), travels, {end: 1}, flags)
        account.spend(weight)
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
        self._notify(Transfer(found, [*map(len, data)], retained), Encoded(body), by_end)

    def _notify(
        self, transfer: Transfer, body: Encoded, by_end: dict[int, int], flags: int = 0
    ) -> None:
        size = len(body.data) if flags else body.nbytes
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
