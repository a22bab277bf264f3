"""This process's shared memory: a few slabs, whose parts are lent, come back, and are lent again.

Invariant: a part is written only while nobody has a view of it. A part whose borrower was lost
without a release is poisoned; its slab lends no more and goes when the other parts have come back,
and the kernel frees the memory when the borrower, too, has unmapped it.

::

    slab:  lending --a part is poisoned, or room is needed for others--> draining --idle--> gone
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final

from rlinf_async.channels.encoded import PIECE_BYTES, copy_buffers
from rlinf_async.channels.wire.frames.framing import Bytes
from rlinf_async.channels.wire.memory.free_list import FreeList
from rlinf_async.channels.wire.memory.slab import PAGE, Loan, Slab, make_slab, view_of

SLAB_BYTES: Final = 64 * 1024**2
POOL_BYTES: Final = 1024**3
"""Of one process. What does not fit goes through the socket."""
ALIGN: Final = 64

log = logging.getLogger(__name__)


class _Lender:
    """A slab and its free parts."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.free = FreeList(PAGE, slab.size)
        self.draining = False

    def take(self, size: int, *, back: bool) -> int | None:
        """Where a part begins that is taken now, with memory ``back`` of it or without.

        Raises:
            OSError: there is no memory for it.
        """
        start = None if self.draining else self.free.take(size)
        if start is not None and back:
            try:
                self.slab.back(start, start + size)
            except OSError:
                self.free.give(start, size)
                raise
        return start


class Copying:
    """Buffers on their way into shared memory, piece by piece. Made by `Pool.begin`.

    Whoever drops it before its end gives the memory back.
    """

    __slots__ = ("_refuse", "_rest", "failed", "views")

    def __init__(
        self,
        views: list[memoryview],
        buffers: Sequence[Bytes],
        refuse: Callable[[OSError], None],
    ) -> None:
        self.views = views
        """where the buffers are once all was copied"""
        self.failed = False
        """the system has no memory for them"""
        self._rest: deque[tuple[memoryview, memoryview]] = deque(
            (view, memoryview(buffer)) for view, buffer in zip(views, buffers, strict=True)
        )
        self._refuse = refuse

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, or can be done."""
        return not self._rest

    def go_on(self, limit: int = PIECE_BYTES) -> int:
        """Copy so many bytes at most; how many were."""
        copied = 0
        while self._rest and copied < limit:
            try:
                copied += self._copy(limit - copied)
            except OSError as error:
                self.failed = True
                self._rest.clear()
                self._refuse(error)
        return copied

    def _copy(self, limit: int) -> int:
        """Copy from the first buffer that is left.

        Raises:
            OSError: there is no memory.
        """
        view, rest = self._rest[0]
        count, done = min(limit, len(rest)), len(view) - len(rest)
        if (place := view_of(view)) is not None:
            start = place.offset + done
            place.loan.slab.back(start, start + count)
        view[done : done + count] = rest[:count]
        if count < len(rest):
            self._rest[0] = view, rest[count:]
        else:
            self._rest.popleft()
        return count


class Pool:
    """Lends parts of its slabs. May be used in any thread."""

    def __init__(self, limit: int = POOL_BYTES, slab_bytes: int = SLAB_BYTES) -> None:
        self._limit = limit
        self._slab_bytes = slab_bytes
        self._lenders: list[_Lender] = []
        self._returned: deque[tuple[_Lender, int, int, bool]] = deque()
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self.refused = 0
        """how often there was no room"""

    @property
    def size(self) -> int:
        """Bytes of all slabs."""
        return sum(lender.slab.size for lender in tuple(self._lenders))

    def lend(self, buffers: Sequence[Bytes]) -> list[memoryview] | None:
        """A copy of these buffers in shared memory; None where there is no room.

        It is free again when the views are gone, here and wherever they were lent to.
        """
        views = self.take([len(buffer) for buffer in buffers])
        for view, buffer in zip(views or (), buffers, strict=views is not None):
            view[:] = buffer
        return views

    def begin(self, buffers: Sequence[Bytes]) -> Copying | None:
        """As `lend`, for what takes its time: nothing was copied yet. The buffers must not change
        until all was."""
        views = self.take([len(buffer) for buffer in buffers], back=False)
        return None if views is None else Copying(views, buffers, self._refuse)

    def take(self, sizes: Sequence[int], *, back: bool = True) -> list[memoryview] | None:
        """Buffers of these sizes in shared memory, one part of it; None where there is no room.

        It is free again when the views are gone, here and wherever they were lent to.

        Args:
            back: have memory behind them. Without it, see `Slab.back` before anything is written.
        """
        offsets, size = _lay_out(sizes)
        with self._lock:
            found = self._find(-(-size // PAGE) * PAGE, back)
            if found is None:
                self.refused += 1
                return None
        lender, start, taken = found
        loan = Loan(lender.slab, partial(self._give_back, lender, start, taken))
        return [loan.view(start + offset, one) for offset, one in zip(offsets, sizes, strict=True)]

    # ---- inside

    def _find(self, size: int, back: bool) -> tuple[_Lender, int, int] | None:
        self._collect()
        try:
            if (found := self._take(size, back)) is not None:
                return found
            if self._make_room(wanted := max(self._slab_bytes, size + PAGE)):
                self._lenders.append(_Lender(make_slab(wanted)))
                return self._take(size, back)
        except OSError as error:
            self._say(_no_more(error))
            return None
        self._say(f"all {self._limit >> 20} MiB of it are in use")
        return None

    def _take(self, size: int, back: bool) -> tuple[_Lender, int, int] | None:
        for lender in self._lenders:
            if (start := lender.take(size, back=back)) is not None:
                return lender, start, size
        return None

    def _make_room(self, wanted: int) -> bool:
        """Whether one more slab of this size is allowed, maybe after others went."""
        for lender in list(self._lenders):
            if self.size + wanted > self._limit and lender.free.idle:
                self._lenders.remove(lender)
        return self.size + wanted <= self._limit

    def _refuse(self, error: OSError) -> None:
        with self._lock:
            self.refused += 1
            self._say(_no_more(error))

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.warning("large arrays go through the socket, not shared memory: %s", why)

    def _give_back(self, lender: _Lender, start: int, size: int, poisoned: bool) -> None:
        # In any thread, and within anything that this thread is doing: so no lock is taken here.
        self._returned.append((lender, start, size, poisoned))

    def _collect(self) -> None:
        """Take in what came back."""
        while self._returned:
            lender, start, size, poisoned = self._returned.popleft()
            lender.free.give(start, size)
            lender.draining |= poisoned
            if lender.draining and lender.free.idle and lender in self._lenders:
                self._lenders.remove(lender)


def _no_more(error: OSError) -> str:
    return f"the system gives no more ({error.strerror})"


def _lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer goes, and how much they take together."""
    offsets, stop = [], 0
    for size in sizes:
        offsets.append(stop)
        stop += -(-size // ALIGN) * ALIGN
    return offsets, stop


def process_pool() -> Pool:
    """The pool of this process; a forked one has another, since two may not lend the same."""
    return _pool_of(os.getpid())


@cache
def _pool_of(pid: int) -> Pool:
    return Pool()


async def copy_in_turns(buffers: Sequence[Bytes]) -> list[memoryview | bytearray]:
    """A copy of these, in shared memory where there is room. Others in this loop have a turn after
    each `PIECE_BYTES`; the buffers must not change meanwhile."""
    copying = process_pool().begin(buffers)
    while copying is not None and not copying.done:
        copying.go_on(PIECE_BYTES)
        await asyncio.sleep(0)
    if copying is not None and not copying.failed:
        return [*copying.views]
    return [*await copy_buffers(buffers)]
