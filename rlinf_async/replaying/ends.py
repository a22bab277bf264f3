"""Ends of channels whose other side is a recording: a receiver gets what was delivered, a sender's
items are kept for the comparison.

They behave as those of `rlinf_async.channels` do, but that nothing is ever full, and that batches
and leases are those of the recording, whatever weight is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from rlinf_async.channels import LatestReceiver, LatestSender, Lease, Receiver, Sender
from rlinf_async.channels.ends import NO_REPLACEMENTS, Key, checked_least
from rlinf_async.channels.errors import ChannelClosed, ChannelEmpty
from rlinf_async.channels.items import ItemRule, channel_rule
from rlinf_async.channels.statistics import KeyState, Statistics
from rlinf_async.replaying.history import Input
from rlinf_async.replaying.script import Script

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class ReplayDiverged(RuntimeError):
    """The worker asks for something else than in the recording, and no answer to that is known."""


class ChannelInfo:
    """A channel of the recording.

    Args:
        name: its name.
        item_type: the type of its items.
    """

    def __init__(self, name: str, item_type: Any) -> None:
        self.name = name
        self.item_type = item_type
        self.rule: ItemRule = channel_rule(item_type, name)


class _End:
    """What the ends of a replay share."""

    def __init__(self, channel: ChannelInfo, script: Script) -> None:
        self._channel = channel
        self._script = script
        self._closed = False

    @property
    def channel_name(self) -> str:
        return self._channel.name

    @property
    def item_type(self) -> Any:
        return self._channel.item_type

    def open(self) -> Self:
        self._check_open()
        return self

    def clone(self, holder: str | None = None) -> Self:
        self._check_open()
        return type(self)(self._channel, self._script)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"this end of channel {self.channel_name!r} was closed")

    async def statistics(self) -> Statistics:
        raise NotImplementedError(
            f"channel {self.channel_name!r}: a replay has no statistics of its channels"
        )

    async def state(self, *, key: Key | None = None) -> KeyState:
        raise NotImplementedError(
            f"channel {self.channel_name!r}: a replay does not know how full its channels were"
        )


class ReplaySender(_End, Sender[T_contra]):
    """Keeps what is put."""

    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        self._check_open()
        self._channel.rule.check(item)
        await self._script.done(self.channel_name, item, key, weight)

    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        self._check_open()
        self._channel.rule.check(item)
        self._script.done_nowait(self.channel_name, item, key, weight)

    def fail(self, error: BaseException | str) -> None:
        self.close()


class ReplayReceiver(_End, Receiver[T_co]):
    """Gives what was delivered."""

    async def get(self, *, key: Key | None = None) -> T_co:
        return self._one(await self._next(key))

    def get_nowait(self, *, key: Key | None = None) -> T_co:
        self._check_open()
        given = self._script.take_nowait(self.channel_name, key)
        if given is None:
            raise ChannelEmpty(f"channel {self.channel_name!r} has no item now")
        return self._one(given)

    def _one(self, given: Input) -> T_co:
        items = self._items(given)
        if len(items) != 1:
            raise ReplayDiverged(
                f"{self._channel.name!r} delivered {len(items)} items together here, as a batch, "
                "and now one is asked for"
            )
        only: T_co = items[0]
        return only

    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        checked_least(self.channel_name, weight, at_least)
        return self._items(await self._next(key))

    async def _next(self, key: Key | None) -> Input:
        self._check_open()
        return await self._script.take(self.channel_name, key)

    def _items(self, given: Input) -> list[Any]:
        return [self._script.transform(body.value()) for body in given.items]

    async def _take(
        self, weight: int, at_least: int | None, key: Key | None, *, confirmed: bool = True
    ) -> tuple[Input, Lease[T_co]]:
        checked_least(self.channel_name, weight, at_least)
        given = await self._next(key)
        items: Sequence[T_co] = self._items(given)
        return given, Lease(items, given.deliveries, self._checked)

    def _checked(self, item: object) -> object:
        self._channel.rule.check(item)
        return item

    async def _acknowledge(
        self, delivery: Input, replacements: Mapping[int, Any] = NO_REPLACEMENTS
    ) -> None:
        self._script.changed.set()

    def _consume(self, delivery: Input) -> None:
        self._script.changed.set()

    def _put_back(self, delivery: Input, error: BaseException) -> None:
        self._script.changed.set()

    def _count_stale(self) -> None:
        """Nobody asks for the number."""


class ReplayLatestSender(_End, LatestSender[T_contra]):
    """Keeps what is published."""

    async def publish(self, value: T_contra) -> int:
        self._channel.rule.check(value)
        await self._script.done(self.channel_name, value, None, 1)
        return self._script.published(self.channel_name)


class ReplayLatestReceiver(_End, LatestReceiver[T_co]):
    """Gives the values that were seen."""

    def __init__(self, channel: ChannelInfo, script: Script) -> None:
        super().__init__(channel, script)
        self.version = 0

    def clone(self, holder: str | None = None) -> Self:
        made = type(self)(self._channel, self._script)
        made.version = self.version
        return made

    async def get(self, *, newer_than: int | None = None) -> T_co:
        than = self.version if newer_than is None else newer_than
        return self._value(await self._script.newer(self.channel_name, than))

    def get_nowait(self) -> T_co | None:
        given = self._script.newer_nowait(self.channel_name, self.version)
        return None if given is None else self._value(given)

    def _value(self, given: Input) -> T_co:
        self.version = given.version or self.version
        value: T_co = self._script.transform(given.items[0].value())
        return value


KINDS: Mapping[str, Callable[[ChannelInfo, Script], Any]] = {
    "sender": ReplaySender,
    "receiver": ReplayReceiver,
    "latest sender": ReplayLatestSender,
    "latest receiver": ReplayLatestReceiver,
}
"""ends by the word that a recording has for each"""
