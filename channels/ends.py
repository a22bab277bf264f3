"""The two ends of a channel, as every worker sees them.

`Sender` and `Receiver` are abstract: `rlinf_async.channels.local` implements them over a queue in
this process, `rlinf_async.channels.wire` over a connection to the process that owns the queue. What
stands here is the same for both.

Life of an end::

    made ---- first use, ``with`` ----> open ---- close() ----> closed (any later use:
    ChannelClosed)

Only open ends are counted: a channel has ended when its last open sender has closed and its items
are taken. `Receiver.get_within_lag` also says whether the weights behind an item are recent enough.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, Self, TypeGuard, TypeVar, overload

import msgspec

from rlinf_async.channels.errors import EndOfChannel
from rlinf_async.channels.statistics import KeyState, Statistics, WaitFuture

T = TypeVar("T")


class Fresh(msgspec.Struct, Generic[T], frozen=True):
    """An item whose weights are at most ``max_lag`` versions old."""

    item: T
    lag: int


class TooStale(msgspec.Struct, Generic[T], frozen=True):
    """An item whose weights are more than ``max_lag`` versions old: counted, and yours to
    handle."""

    item: T
    lag: int


def oldest_version(item: object) -> int:
    """The oldest weight version that had a part in this item.

    Raises:
        TypeError: the item carries no ``version``.
    """
    version: Any = getattr(item, "version", None)
    if version is None:
        raise TypeError(
            f"{type(item).__name__} carries no 'version', so its staleness cannot be known: "
            "give it a field 'version' (an int, or one for each part)"
        )
    if not _has_parts(version):
        return int(version)
    if len(version) == 0:
        raise TypeError(f"the 'version' of this {type(item).__name__} is empty: who made it?")
    return int(min(version))


def _has_parts(version: Any) -> bool:
    return getattr(version, "ndim", 0) > 0 or isinstance(version, Sequence)


T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

NO_REPLACEMENTS: Final[Mapping[int, Any]] = MappingProxyType({})

Key = str | int
"""Routes an item to one consumer."""


class Holder:
    """Who holds a lease of a channel: a task, and every task that is started while it does, such as
    the one in which `asyncio.wait_for` waits. What they get of this channel, they get as one: none
    waits for what another of them may return."""

    __slots__ = ("channel", "outer", "over", "task")

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.over: bool = False
        self.task = getting_task(channel)
        outer = _holder.get()
        while outer is not None and outer.over:
            outer = outer.outer
        self.outer: Holder | None = outer
        _holder.set(self)


_holder: ContextVar[Holder | None] = ContextVar("_holder", default=None)
"""the innermost lease in whose block this runs, or ran"""


def getting_task(channel: str) -> object:
    """The task that runs; inside a lease of the channel of this name, the one that holds it."""
    holder = _holder.get()
    while holder is not None and (holder.over or holder.channel != channel):
        holder = holder.outer
    return asyncio.current_task() if holder is None else holder.task


def holds_lease() -> bool:
    """Whether a lease, of any channel, is held where this runs."""
    holder = _holder.get()
    while holder is not None and holder.over:
        holder = holder.outer
    return holder is not None


class CallLeases:
    """The leases of one call of a worker. Once the call is to leave the worker, it takes no more::

        working --leave()--> leaving: a task that asks for a lease while it holds none is parked,
                             also where it has asked already; what is leased is finished
                             --no lease is left, or a task was parked--> `on_change` looks

    A task that holds a lease may take others, which it may need to end the first.
    """

    __slots__ = ("_on_change", "_taking", "held", "leaving", "parked", "used")

    def __init__(self) -> None:
        self.held = 0
        """leases that are held now"""
        self.used = False
        """whether the call has ever leased anything"""
        self.leaving = False
        self.parked: set[asyncio.Task[Any] | None] = set()
        """tasks that wait for the call to end"""
        self._taking: dict[asyncio.Task[Any], bool] = {}
        """tasks that wait for a lease and hold none; whether they were told to wait no longer"""
        self._on_change: Callable[[], object] | None = None

    def leave(self, on_change: Callable[[], object]) -> None:
        """Take no more. ``on_change`` is called whenever less goes on in the call than before."""
        self.leaving = True
        self._on_change = on_change
        for task in self._taking:
            self._taking[task] = True
            task.cancel()

    async def take(self, take: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``take`` returns: a lease; never where the call leaves."""
        lease = await (take() if holds_lease() else self._take_first(take))
        self.held += 1
        self.used = True
        return lease

    def ended(self) -> None:
        """Note the end of a lease."""
        self.held -= 1
        if self._on_change is not None:
            self._on_change()

    async def _take_first(self, take: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a lease is taken by a task")
        while True:
            if self.leaving:
                await self._park(task)
            before = task.cancelling()
            self._taking[task] = False
            try:
                return await take()
            except asyncio.CancelledError:
                if not self._taking[task] or task.uncancel() > before:
                    raise
            finally:
                del self._taking[task]

    async def _park(self, task: asyncio.Task[Any]) -> None:
        self.parked.add(task)
        if self._on_change is not None:
            self._on_change()
        try:
            await WaitFuture()
        finally:
            self.parked.discard(task)


current_leases: ContextVar[CallLeases | None] = ContextVar("current_leases", default=None)
"""leases of the call of a worker that this runs in"""


class Lease(Sequence[T_co]):
    """Items that were taken but not yet consumed.

    ``deliveries[i]`` says how often item ``i`` has been handed out, this time included.
    """

    __slots__ = ("_items", "_prepare", "deliveries", "replacements")

    def __init__(
        self,
        items: Sequence[T_co],
        deliveries: Sequence[int],
        prepare: Callable[[object], object],
    ) -> None:
        self._items = items
        self._prepare = prepare
        self.deliveries = deliveries
        self.replacements: dict[int, object] = {}
        """by index: what goes back instead of being consumed, as the channel keeps it"""

    def replace(self, index: int, item: object) -> None:
        """Return ``item`` to the channel in the place of item ``index`` when the block ends.

        For work that was begun and that somebody else is to finish: the replacement has the place
        in the order, the weight and the count of deliveries that the item had before it was taken.
        Both never exist at the same time: one message settles the lease, and if the block fails or
        this process dies before, the item itself goes back.

        Raises:
            WrongItemType: ``item`` is not of the channel's type.
            IndexError: there is no such item.
        """
        if not 0 <= index < len(self._items):
            raise IndexError(f"a lease of {len(self._items)} items has none of index {index}")
        self.replacements[index] = self._prepare(item)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Named(abc.ABC):
    """The name and the item type of an end's channel."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def channel_name(self) -> str:
        """Name of the channel."""

    @property
    @abc.abstractmethod
    def item_type(self) -> Any:
        """The type of the channel's items."""


class End(Named):
    """What both ends share: a name, a type, and being closed."""

    __slots__ = ()

    @abc.abstractmethod
    def open(self) -> Self:
        """Count this end as open from now on (its first use does the same)."""

    @abc.abstractmethod
    def clone(self, holder: str | None = None) -> Self:
        """Return another open end of the same channel, closed on its own. A channel's own ends
        (``channel.sender``) can be cloned after they were closed, too. ``holder`` names who will
        use it in reports; by default, the party that runs now.

        A channel's own ends (``channel.sender``) can be cloned after they were closed, too.

        ``holder`` names who will use it in reports; by default, the party that runs now.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give this end up. Closing twice is harmless."""

    @abc.abstractmethod
    async def statistics(self) -> Statistics:
        """What the channel has seen so far."""

    @abc.abstractmethod
    async def state(self, *, key: Key | None = None) -> KeyState:
        """How full this key of the channel is now: depth, room, weight.

        It may have changed by the time that it is known here.
        """

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        type_name = getattr(self.item_type, "__name__", str(self.item_type))
        return f"<{type(self).__name__} of {self.channel_name!r} [{type_name}]>"


class Sender(End, Generic[T_contra]):
    """The end that items are put into."""

    __slots__ = ()

    @abc.abstractmethod
    async def put(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        """Put an item; wait while the channel is full.

        The item belongs to the channel from here on: do not change it, nor the arrays in it. (When
        its bytes are taken depends on where the queue is.)

        A cancelled ``put`` leaves no item behind, unless it had been taken already.

        Raises:
            WrongItemType: the item is not of the channel's type.
            NoReceivers: every receiver has closed.
            ChannelClosed: this end, or the whole channel, was closed.
            ChannelFailed: the channel was failed.
        """

    async def flush(self) -> None:
        """Return once everything that this end has put is in the channel.

        To a channel of another process ``put`` may return earlier, on credit:
        one that is refused, or may be lost with its connection, is raised by the next ``put``,
        ``flush`` or ``close``.

        Raises: as `put`; ConnectionLost.
        """

    @abc.abstractmethod
    def put_nowait(self, item: T_contra, *, key: Key | None = None, weight: int = 1) -> None:
        """Put an item, or raise `ChannelFull`. Only where the channel lives in this process."""

    @abc.abstractmethod
    def fail(self, error: BaseException | str) -> None:
        """End the channel with an error: every waiting and every later use of any end, this one
        included, raises it as `ChannelFailed`. The first error stays.

        Raises:
            ChannelClosed: this end was closed before.
        """


class Receiver(End, Generic[T_co]):
    """The end that items are taken from."""

    __slots__ = ()

    @abc.abstractmethod
    async def get(self, *, key: Key | None = None) -> T_co:
        """Take the oldest item of this key; wait while there is none.

        A cancelled ``get`` leaves the item in the channel.

        Raises:
            EndOfChannel: every sender has closed and nothing is left.
            ChannelClosed: this end was closed.
            ChannelFailed: the channel was failed.
        """

    @abc.abstractmethod
    def get_nowait(self, *, key: Key | None = None) -> T_co:
        """Take an item, or raise `ChannelEmpty`. Only where the channel lives in this process."""

    @abc.abstractmethod
    async def get_batch(
        self, *, weight: int, at_least: int | None = None, key: Key | None = None
    ) -> list[T_co]:
        """Take items, oldest first, until their weights reach ``weight``.

        The batch never exceeds ``weight``, but for an item that is heavier by itself: it is
        delivered alone. With ``at_least`` the batch is delivered as soon as it weighs that much and
        nothing more is ready. At the end of the channel what is left is delivered, however little.
        A batch of a channel that is ``stealing`` takes what is there: it needs ``at_least=1``.

        Raises: as `get`.
        """

    @abc.abstractmethod
    async def _take(
        self, weight: int, at_least: int | None, key: Key | None, *, confirmed: bool = True
    ) -> tuple[Any, Lease[T_co]]:
        """Take items under a lease; its delivery, as the end knows it, and its items.

        ``confirmed``: it ends with `_acknowledge`; else with `_consume`, which nobody waits for.
        """

    @abc.abstractmethod
    async def _acknowledge(
        self, delivery: Any, replacements: Mapping[int, Any] = NO_REPLACEMENTS
    ) -> None:
        """Settle a lease's items as taken, or by their replacements; return when the channel has.

        Raises:
            LeaseLost: they went back to the channel before, or it cannot be known.
        """

    @abc.abstractmethod
    def _consume(self, delivery: Any) -> None:
        """Acknowledge a delivery without waiting for the channel."""

    @abc.abstractmethod
    def _put_back(self, delivery: Any, error: BaseException) -> None:
        """Settle a lease's items as failed because of this error."""

    @abc.abstractmethod
    def _count_stale(self) -> None:
        """One more item came back as `TooStale`."""

    @asynccontextmanager
    async def lease(
        self, *, weight: int = 1, at_least: int | None = None, key: Key | None = None
    ) -> AsyncIterator[Lease[T_co]]:
        """Take items as `get_batch` does, but consume them only when the block ends normally.

        An exception, a cancellation, or the death of this process puts them back at the head, in
        order. An item that has failed ``max_deliveries`` times goes to the channel's dead letters
        with the error instead. What was replaced (`Lease.replace`) goes back, too, as its
        replacement. Leaving the block waits until a channel of another process has
        confirmed that the items are consumed. A worker that leases until the channel ends::

            with contextlib.suppress(EndOfChannel):
                while True:
                    async with receiver.lease(weight=8) as items:
                        ...

        Raises: as `get`, and at the end of the block:
            LeaseLost: the items went back before, or the connection was lost before the channel
                confirmed: they may be delivered again.
        """
        call = current_leases.get()
        if call is None:
            delivery, items = await self._take(weight, at_least, key)
        else:
            delivery, items = await call.take(partial(self._take, weight, at_least, key))
        holder = Holder(self.channel_name)
        try:
            try:
                yield items
            except EndOfChannel as error:
                self._put_back(delivery, error)
                raise RuntimeError(  # else the caller would take it for the end of this channel
                    f"EndOfChannel was raised inside a lease of channel {self.channel_name!r}: "
                    "handle the end of the other channel inside the block"
                ) from error
            except BaseException as error:
                self._put_back(delivery, error)
                raise
            finally:
                holder.over = True
            await self._acknowledge(delivery, items.replacements)
        finally:
            if call is not None:
                call.ended()

    async def get_within_lag(
        self, *, current: int, max_lag: int, key: Key | None = None
    ) -> Fresh[T_co] | TooStale[T_co]:
        """Take an item and say whether its weights are recent enough.

        The item's ``version`` (a number, or the versions of its parts, of which the oldest counts)
        is compared with ``current``. A stale item is never mixed in: it comes back as `TooStale`,
        and is counted.
        """
        delivery, [item] = await self._take(1, None, key, confirmed=False)
        try:
            lag = current - oldest_version(item)
        except BaseException as error:  # an item without a version goes back
            self._put_back(delivery, error)
            raise
        self._consume(delivery)
        if lag <= max_lag:
            return Fresh(item, lag)
        self._count_stale()
        return TooStale(item, lag)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.get()
        except EndOfChannel:
            raise StopAsyncIteration from None


class LatestSender(Named, Generic[T_contra]):
    """The end that values are published at."""

    __slots__ = ()

    @abc.abstractmethod
    async def publish(self, value: T_contra) -> int:
        """Replace the value; its version. Never waits for a receiver."""

    @abc.abstractmethod
    def close(self) -> None:
        """No newer value will come: waiting receivers end."""


class LatestReceiver(Named, Generic[T_co]):
    """The end that values are read from. It remembers which version it has seen."""

    __slots__ = ()

    version: int
    """version of the value last returned; 0 before the first"""

    @abc.abstractmethod
    async def get(self, *, newer_than: int | None = None) -> T_co:
        """The newest value, once it is newer than ``newer_than`` (default: than the last one seen
        here).

        Raises:
            EndOfChannel: closed, and nothing newer will come.
            ChannelFailed: it was failed.
        """

    @abc.abstractmethod
    def clone(self) -> Self:
        """Return another receiver, which has seen what this one has."""

    @abc.abstractmethod
    def get_nowait(self) -> T_co | None:
        """The newest value if it is newer than the last one seen here, else None.

        Where the `Latest` lives in another process: the newest value that has arrived. The first
        call asks for it, and from then on each value is sent as it is published, until `get` is
        called.

        Raises: as `get`.
        """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.get()
        except EndOfChannel:
            raise StopAsyncIteration from None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def checked_least(channel: str, weight: object, at_least: object, stealing: bool = False) -> int:
    """The weight from which on a batch may be delivered.

    Raises:
        TypeError, ValueError: there is no such batch; one that waits for more would keep items from
            the gets of a channel that is ``stealing``.
    """
    least = weight if at_least is None else at_least
    if not (_is_int(weight) and _is_int(least)):
        raise TypeError(
            f"channel {channel!r}: the weights of a batch are ints, got weight={weight!r}, "
            f"at_least={at_least!r}"
        )
    if not 1 <= least <= weight:
        raise ValueError(
            f"channel {channel!r}: a batch needs 1 <= at_least <= weight, "
            f"got weight={weight}, at_least={at_least}"
        )
    if stealing and least > 1:
        raise ValueError(
            f"channel {channel!r} is stealing: no item waits while any get does, so a batch cannot "
            f"wait until it weighs {least}; pass at_least=1 to take what is there"
        )
    return least
