"""Arrays in shared memory that the peer of a connection lends to this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import MAX_BUFFERS, MAX_MESSAGE_BYTES
from rlinf_async.channels.wire.memory.memory_protocol import (
    Announce,
    Notice,
    Opened,
    Place,
    Refused,
    Retired,
    decode_places,
)
from rlinf_async.channels.wire.memory.slab import PAGE, Loan, Slab, SlabRefused, open_slab

MAX_SLABS: Final = 256
"""largest number of slabs of one peer that are open in this process"""
MAX_REPEATED_BYTES: Final = 2 * 1024**3
"""limit of the shared bytes of a message, where it exceeds the size of their slabs: a reference to
the same memory again and again costs its sender nothing, and a copy of each costs this process"""


class Borrowing:
    """The shared memory of the peer that this process may read.

    Args:
        send: sends a notice to the peer, at once.
        release: notes, in any thread, that a loan is released and whether it is poisoned; the
            notice follows later.
    """

    def __init__(
        self, send: Callable[[Notice], None], release: Callable[[int, bool], None]
    ) -> None:
        self._send = send
        self._release = release
        self._slabs: dict[int, Slab] = {}

    def announced(self, notice: Announce, pid: int) -> None:
        """Open a slab of the process ``pid``, and send the peer the result."""
        try:
            if not pid:
                raise SlabRefused("it is not known which process of this host is the peer")
            if len(self._slabs) >= MAX_SLABS:
                raise SlabRefused(f"{MAX_SLABS} pieces of its memory are open here")
            self._slabs[notice.slab] = open_slab(pid, notice.file, notice.token)
        except SlabRefused as refused:
            self._send(Refused(notice.slab, str(refused)))
        else:
            self._send(Opened(notice.slab))

    def retired(self, notice: Retired) -> None:
        """Remove a slab. Its memory stays mapped while arrays over it are used."""
        self._slabs.pop(notice.slab, None)

    def restore(self, received: Encoded) -> Encoded:
        """The body that was passed to `Lending.share` by the peer.

        Raises:
            MalformedFrame: the table of places is missing, or names memory that was not lent.
        """
        if not received.buffers:
            raise MalformedFrame("a message with shared arrays does not say where they are")
        places = decode_places(received.buffers[0])
        self._check(places, len(received.buffers) - 1)
        beside = iter(received.buffers[1:])
        shared = self._borrow([place for place in places if place is not None])
        return Encoded(received.data, [next(beside if one is None else shared) for one in places])

    def close(self) -> None:
        """The connection is closed: no message will refer to a slab any more."""
        self._slabs.clear()

    # ---- internals

    def _check(self, places: list[Place | None], beside: int) -> None:
        if places.count(None) != beside or len(places) > MAX_BUFFERS:
            raise MalformedFrame(f"{len(places)} arrays, {beside} of them not shared")
        total = 0
        slab_of: dict[int, int] = {}
        for place in places:
            if place is None:
                continue
            slab = self._slabs.get(place.slab)
            if slab is None:
                raise MalformedFrame(f"slab {place.slab} of shared memory was not announced")
            if place.size < 1 or not PAGE <= place.offset <= slab.size - place.size:
                raise MalformedFrame(
                    f"{place.size} bytes at {place.offset} of shared memory that has {slab.size}"
                )
            if slab_of.setdefault(place.loan, place.slab) != place.slab:
                raise MalformedFrame(f"part {place.loan} of shared memory lies in two slabs")
            total += place.size
        mapped = sum(self._slabs[number].size for number in {*slab_of.values()})
        allowed = min(MAX_MESSAGE_BYTES, max(MAX_REPEATED_BYTES, mapped))
        if total > allowed:
            raise MalformedFrame(f"{total} bytes shared, {allowed} are allowed")

    def _borrow(self, places: list[Place]) -> Iterator[memoryview | bytearray]:
        """The arrays at these places, in order."""
        parts: dict[int, list[Place]] = {}
        for place in places:
            parts.setdefault(place.loan, []).append(place)
        loans = {number: self._loan(number, part) for number, part in parts.items()}
        arrays: list[memoryview | bytearray] = []
        for place in places:
            loan = loans[place.loan]
            if loan is None:
                arrays.append(self._slabs[place.slab].read(place.offset, place.size))
            else:
                arrays.append(loan.view(place.offset, place.size))
        for number, loan in loans.items():
            if loan is None:
                self._release(number, False)
        return iter(arrays)

    def _loan(self, number: int, places: list[Place]) -> Loan | None:
        """The loan of these places; None where their pages are in use here, and may be written."""
        slab = self._slabs[places[0].slab]
        start = min(place.offset for place in places) // PAGE * PAGE
        stop = -(-max(place.offset + place.size for place in places) // PAGE) * PAGE
        if slab.in_use(start, stop):
            return None
        slab.use(start, stop)
        return Loan(slab, partial(self._loan_ended, number, slab, start, stop))

    def _loan_ended(self, number: int, slab: Slab, start: int, stop: int, poisoned: bool) -> None:
        slab.unuse(start, stop)
        self._release(number, poisoned)
