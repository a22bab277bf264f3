"""Payloads: the large arrays of items that stayed with their producer while the items are queued.

The buffers of such an item are a `RemotePayload`, which knows their sizes, loads them into this
process if they are needed here, and then stands for them. The producer keeps a payload as long as
anything refers to its `RemotePayload` and it is not loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

from rlinf_async.channels.encoded import Buffer, Encoded
from rlinf_async.channels.errors import ChannelError

log = logging.getLogger(__name__)
Fetch = Callable[[], Coroutine[Any, Any, Sequence[Buffer]]]


class PayloadLost(ChannelError):
    """The payload is gone with its producer. The get is given the next item."""


class Missing:
    """A stand-in for an array that is not here."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class RemotePayload(Sequence[Buffer]):
    """The large arrays of one item that are not here.

    Args:
        sizes: of each of them, in bytes.
        where: whatever says where they are.
        fetch: brings them; raises `PayloadLost`.
        holder: the process that has them, in reports.
    """

    __slots__ = ("__weakref__", "_fetch", "_task", "holder", "loaded", "lost", "sizes", "where")

    def __init__(
        self, sizes: Sequence[int], where: Any, fetch: Fetch | None = None, holder: str = ""
    ) -> None:
        self.sizes = sizes
        self.holder = holder
        self.where = where
        self._fetch = fetch
        self._task: asyncio.Task[None] | None = None
        self.loaded: Sequence[Buffer] | None = None
        """the arrays, once they are here"""
        self.lost = False
        """whether it is gone with its producer"""

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Buffer]:
        if self.loaded is not None:
            return iter(self.loaded)
        return iter([cast("Buffer", Missing(size)) for size in self.sizes])

    def __getitem__(self, index: Any) -> Any:
        if self.loaded is None:
            raise ChannelError("the arrays of this item are still with its producer")
        return self.loaded[index]

    async def wait_loaded(self) -> Sequence[Buffer]:
        """Wait until the arrays are here. If this is cancelled, they are fetched all the same.

        Raises:
            PayloadLost: it is gone with its producer.
        """
        while self.loaded is None:
            if self.lost:
                raise PayloadLost("the arrays of an item went with its producer")
            await asyncio.wait([self.start_loading()])
        return self.loaded

    @property
    def loading(self) -> bool:
        """Whether the arrays are being fetched."""
        return self._task is not None

    def start_loading(self, fetch: Fetch | None = None) -> asyncio.Task[None]:
        """Start to fetch the arrays; by ``fetch`` where no way to fetch them is known."""
        self._fetch = self._fetch or fetch
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._load())
        return self._task

    async def _load(self) -> None:
        assert self._fetch is not None
        try:
            if self.loaded is None and not self.lost:
                self.loaded = await self._fetch()
        except PayloadLost:
            self.lost = True
        except Exception:
            log.exception("fetching the arrays of an item failed: they count as lost")
            self.lost = True
        finally:
            self._task = None


def remote_payload_of(item: object) -> RemotePayload | None:
    """What of this item is neither here nor known to be lost for good."""
    if isinstance(item, Encoded) and isinstance(item.buffers, RemotePayload):
        return item.buffers if item.buffers.loaded is None else None
    return None


def is_lost(item: object) -> bool:
    """Whether the arrays of this item went with its producer."""
    payload = remote_payload_of(item)
    return payload is not None and payload.lost
