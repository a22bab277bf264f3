"""`Latest`: a channel that holds only the newest value.

For what is superseded, not consumed: weight versions, scaling decisions. Each published value gets
the next version, from 1; receivers wait for one newer than they have. Values that no receiver saw
are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import UnionType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import msgspec

from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.ends import LatestReceiver, LatestSender, Named
from rlinf_async.channels.errors import ChannelClosed, ChannelFailed, EndOfChannel
from rlinf_async.channels.items import channel_rule
from rlinf_async.channels.statistics import Wait, WaitFuture, current_party

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Tap(Protocol):
    """What a `Latest` that is recorded tells its recorder. Never waits, never raises."""

    def published(self, value: Any, version: int, sender: str) -> None:
        """This party published the value."""

    def seen(self, version: int, receiver: str, *, ahead: bool) -> None:
        """This party was given the value; ``ahead``: before it asked."""

    def ended(self, error: str) -> None:
        """No newer value will come: it was closed, or failed with this."""


class LatestStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a `Latest` has seen so far."""

    name: str
    version: int
    """version of the newest value; 0 before the first"""
    superseded: int
    """values that were replaced before any receiver took them"""
    waiting: int


class Latest(Generic[T]):
    """Holds the newest value only. Lives in one process; its ends may be anywhere."""

    def __init__(self, item_type: type[T] | UnionType, *, name: str) -> None:
        self.item_type: Any = item_type
        self.name = name
        self.version = 0
        self.superseded = 0
        # set where other processes have ends
        self._decode: Callable[[Encoded], Any] | None = None
        self._encode: Callable[[Any], Encoded] | None = None
        self.form = Form()
        self._rule = channel_rule(item_type, name)
        self._value: Any = None
        self._seen = True
        self._closed = False
        self._failure: tuple[str, BaseException | None] | None = None
        self.tap: Tap | None = None
        """who is told of all that happens; None where nothing is recorded"""
        self._waits: dict[WaitFuture, tuple[str, float, int]] = {}
        self.publisher = "its publisher"
        self.sender: LatestSender[T] = LocalLatestSender(self)
        self.receiver: LatestReceiver[T] = LocalLatestReceiver(self)

    @property
    def newest(self) -> T | Encoded:
        """The newest value, as it is kept; None before the first."""
        return cast("T | Encoded", self._value)

    def _publish(self, value: T | Encoded, party: str | None = None) -> int:
        """Replace the value; its version. One from another process stays encoded until taken."""
        self._check()
        if self._closed:
            raise ChannelClosed(f"channel {self.name!r} was closed: nothing can be published")
        arrived = self._decode is not None and isinstance(value, Encoded)
        if not arrived:
            self._rule.check(value)
        self.superseded += not self._seen
        self._value, self._seen = value, False
        self.version += 1
        self.publisher = party or current_party.get()
        if self.tap is not None:
            self.tap.published(value, self.version, self.publisher)
        self._wake()
        return self.version

    def _take_newer(self, than: int) -> tuple[int, T | Encoded] | None:
        """The newest value and its version, or None where it is not newer."""
        self._check()
        if self.version > than:
            self._seen = True
            return self.version, self._value
        if self._closed:
            raise EndOfChannel(f"channel {self.name!r} has ended at version {self.version}")
        return None

    async def wait_newer(
        self, than: int, party: str | None = None, reader: str = ""
    ) -> tuple[int, T | Encoded]:
        """Wait for a value newer than this version.

        Args:
            than: the version.
            party: who waits, in reports; empty for a receiver that only reads ahead, and is in
                none.
            reader: the process that reads, where it is another one.
        """
        while (found := self._take_newer(than)) is None:
            loop = asyncio.get_running_loop()
            future = WaitFuture(loop=loop)
            holder = current_party.get() if party is None else party
            self._waits[future] = (holder, loop.time(), than)
            try:
                await future
            finally:
                self._waits.pop(future, None)
        if self.tap is not None:
            self.tap.seen(found[0], party or reader or current_party.get(), ahead=party == "")
        return found

    def value(self, found: T | Encoded) -> T:
        """The value to hand out here. One from another process is decoded now.

        Raises:
            MalformedFrame: it is not of the channel's type.
        """
        value: Any = found
        if isinstance(found, Encoded) and self._decode is not None:
            value = self._decode(found)
        here: T = value
        return here

    def close(self) -> None:
        """No newer value will come."""
        if self.tap is not None and not self._closed:
            self.tap.ended("")
        self._closed = True
        self._wake()

    def fail(self, error: BaseException | str) -> None:
        """Every waiting and later use raises."""
        if self._failure is None:
            said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self._failure = said, error if isinstance(error, BaseException) else None
            if self.tap is not None:
                self.tap.ended(said)
            self._wake()

    async def statistics(self) -> LatestStatistics:
        """Return what the channel has seen so far."""
        return LatestStatistics(
            name=self.name,
            version=self.version,
            superseded=self.superseded,
            waiting=sum(1 for party, _, _ in self._waits.values() if party),
        )

    def waits(self) -> list[Wait]:
        """Everybody who waits for a newer value."""
        now = asyncio.get_running_loop().time() if self._waits else 0.0
        return [
            Wait(party, "get", self.name, f"newer than {than}", now - since, (self.publisher,))
            for party, since, than in self._waits.values()
            if party
        ]

    def _check(self) -> None:
        if self._failure is not None:
            said, cause = self._failure
            raise ChannelFailed(f"channel {self.name!r} failed: {said}") from cause

    def _wake(self) -> None:
        for future in self._waits:
            if not future.done():
                future.set_result(None)


class _LocalLatestEnd(Named):
    """An end of a `Latest` in this process."""

    __slots__ = ("_latest",)

    def __init__(self, latest: Latest[Any]) -> None:
        self._latest = latest

    @property
    def latest(self) -> Latest[Any]:
        return self._latest

    @property
    def channel_name(self) -> str:
        return self._latest.name

    @property
    def item_type(self) -> Any:
        return self._latest.item_type


class LocalLatestSender(_LocalLatestEnd, LatestSender[T_contra]):
    """Publishes to a `Latest` in this process."""

    __slots__ = ()

    async def publish(self, value: T_contra) -> int:
        return self._latest._publish(value)

    def close(self) -> None:
        self._latest.close()


class LocalLatestReceiver(_LocalLatestEnd, LatestReceiver[T_co]):
    """Reads a `Latest` in this process."""

    __slots__ = ("version",)

    def __init__(self, latest: Latest[Any]) -> None:
        super().__init__(latest)
        self.version = 0

    def clone(self) -> Self:
        made = type(self)(self._latest)
        made.version = self.version
        return made

    async def get(self, *, newer_than: int | None = None) -> T_co:
        than = self.version if newer_than is None else newer_than
        self.version, found = await self._latest.wait_newer(than)
        result: T_co = self._latest.value(found)
        return result

    def get_nowait(self) -> T_co | None:
        found = self._latest._take_newer(self.version)
        if found is None:
            return None
        self.version, value = found
        if self._latest.tap is not None:
            self._latest.tap.seen(self.version, current_party.get(), ahead=False)
        result: T_co = self._latest.value(value)
        return result
