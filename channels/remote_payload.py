"""Large arrays that stayed with their producer, while their items are queued here.

Such an item is an `Encoded` whose buffers are an `Away`: it knows their sizes, and how they are
brought here if that is needed; then it stands for them. As long as anything refers to it before,
the producer keeps them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from rlinf_async.channels.delivery import Delivery, Outcome
from rlinf_async.channels.encoded import Buffer, Encoded
from rlinf_async.channels.errors import ChannelError

if TYPE_CHECKING:
    from rlinf_async.channels.key_queue import KeyQueue

BRING_AHEAD: Final = 4
"""Items behind the one that is taken in this process, which are brought meanwhile."""
log = logging.getLogger(__name__)
Fetch = Callable[[], Coroutine[Any, Any, Sequence[Buffer]]]


class PayloadLost(ChannelError):
    """Its producer is gone, and what it kept with it. Whoever gets is given the next item."""


class Missing:
    """Stands for an array that is not here."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Away(Sequence[Buffer]):
    """The large arrays of one item that are not here.

    Args:
        sizes: of each of them, in bytes.
        where: whatever says where they are.
        fetch: brings them; raises `PayloadLost`.
        holder: the process that has them, in reports.
    """

    __slots__ = ("__weakref__", "_fetch", "_task", "brought", "holder", "lost", "sizes", "where")

    def __init__(
        self, sizes: Sequence[int], where: Any, fetch: Fetch | None = None, holder: str = ""
    ) -> None:
        self.sizes = sizes
        self.holder = holder
        self.where = where
        self._fetch = fetch
        self._task: asyncio.Task[None] | None = None
        self.brought: Sequence[Buffer] | None = None
        """they themselves, once they are here"""
        self.lost = False
        """nobody has them any more"""

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Buffer]:
        if self.brought is not None:
            return iter(self.brought)
        return iter([cast("Buffer", Missing(size)) for size in self.sizes])

    def __getitem__(self, index: Any) -> Any:
        if self.brought is None:
            raise ChannelError("the arrays of this item are still with its producer")
        return self.brought[index]

    async def bring(self) -> Sequence[Buffer]:
        """Wait until they are here. Cancelled, they come all the same.

        Raises:
            PayloadLost: nobody has them any more.
        """
        while self.brought is None:
            if self.lost:
                raise PayloadLost("the arrays of an item went with its producer")
            await asyncio.wait([self.start()])
        return self.brought

    def start(self) -> asyncio.Task[None]:
        """Let them come."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._bring())
        return self._task

    async def _bring(self) -> None:
        assert self._fetch is not None
        try:
            if self.brought is None and not self.lost:
                self.brought = await self._fetch()
        except PayloadLost:
            self.lost = True
        except Exception:
            log.exception("bringing the arrays of an item: they count as lost")
            self.lost = True
        finally:
            self._task = None


def away_of(item: object) -> Away | None:
    """What of this item is neither here nor known to be lost for good."""
    if isinstance(item, Encoded) and isinstance(item.buffers, Away):
        return item.buffers if item.buffers.brought is None else None
    return None


def is_lost(item: object) -> bool:
    """Whether the arrays of this item went with its producer."""
    away = away_of(item)
    return away is not None and away.lost


def start_ahead(queue: KeyQueue) -> None:
    """Somebody here takes items, and will take these: let them come."""
    for entry in islice(queue.entries, BRING_AHEAD):
        if (away := away_of(entry.item)) is not None and not away.lost:
            away.start()


async def bring(delivery: Delivery) -> bool:
    """Wait until all of these items are here; False if some are lost, and the others returned."""
    start_ahead(delivery.queue)
    lost: list[int] = []
    aways = [away_of(entry.item) for entry in delivery.held()]
    for away in aways:
        if away is not None and not away.lost:
            away.start()
    for index, away in enumerate(aways):
        try:
            if away is not None:
                await away.bring()
        except PayloadLost:
            lost.append(index)
    if lost:
        delivery.queue.return_except(delivery, lost, Outcome.LOST)
    return not lost
