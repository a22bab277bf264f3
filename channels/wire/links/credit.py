"""The client's side of credit: what the owner of channels has granted to this process, key by key.

What is not spent goes back to the owner: when that recalls it, and by itself after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.ends import Key
from rlinf_async.channels.wire.links.protocol import Credit
from rlinf_async.channels.wire.session.answers import PeerRequests, Request

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.connection import Connection

MAX_KEY: Final = 128
"""Characters of a key for which credit is granted."""
MAX_ACCOUNTS: Final = 256
IDLE_SECONDS: Final = 1.0
"""Credit that was not spent for so long goes back."""
SWEEP_SECONDS: Final = 0.05
"""Where there are too many keys, it goes back after so long."""


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
    """Those of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.registered: dict[tuple[int, Key | None], Account] = {}
        """by channel and key; no more than `MAX_ACCOUNTS`"""
        self._sweeper: asyncio.TimerHandle | None = None
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
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._swept)

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
        if self._sweeper is not None:
            self._sweeper.cancel()
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

    def _swept(self) -> None:
        self._sweeper = None
        if not self._connection.closed:
            self.sweep()
            if any(account.items for account in self.registered.values()):
                self._sweeper = self._loop.call_later(IDLE_SECONDS, self._swept)
