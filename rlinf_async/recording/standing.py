"""What a file of a recording repeats of those before it: launches of workers that live, and calls
that still run.

A replay needs them, and the files in which they were noted are the first that are deleted for the
limit. They stand in the header of each file as one frame: see `segments.Header`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Final

from rlinf_async.channels.encoded import Encoded
from rlinf_async.recording.events import Called, Event, Launched, Returned
from rlinf_async.recording.segments import frame_of

NOTHING: Final = Encoded(b"\xc0")
MOST_BYTES: Final = 1024**2
"""size from which on the arguments of a launch, or a call, are not repeated"""


class Standing:
    """The launches and calls that are of use behind the events that were written so far."""

    def __init__(self) -> None:
        self._launches: dict[str, Event] = {}
        """the last one of each worker, by its name"""
        self._calls: dict[int, Event] = {}
        """those that have not ended, by their number"""

    def follow(self, events: Iterable[Event]) -> None:
        """Take these in: copies, of `kept`."""
        for event in events:
            match event:
                case Launched():
                    self._launches[event.worker] = event
                case Called():
                    self._calls[event.call] = event
                case Returned():
                    self._calls.pop(event.call, None)
                case _:
                    pass

    def frame(self, most: int) -> bytes:
        """All of them as a frame; empty where there is none.

        Args:
            most: bytes of all arguments: the largest are left out, and the events say so.
        """
        standing = [copy.copy(one) for one in (*self._launches.values(), *self._calls.values())]
        if not standing:
            return b""
        room = most
        for event in sorted(standing, key=_nbytes):
            room -= _nbytes(event)
            if room < 0:
                _leave_out(event)
        return b"".join(frame_of(sorted(standing, key=lambda one: one.number)))


def kept(events: Sequence[Event]) -> list[Event]:
    """Copies of those events of a frame that `Standing.follow` is to be told of."""
    found: list[Event] = [
        copy.copy(one) for one in events if isinstance(one, (Launched, Called, Returned))
    ]
    for event in found:
        if isinstance(event, Returned):
            event.bodies = None
        elif _nbytes(event) > MOST_BYTES:
            _leave_out(event)
    return found


def _nbytes(event: Event) -> int:
    return sum(body.nbytes for body in event.bodies or ())


def _leave_out(event: Event) -> None:
    assert isinstance(event, (Launched, Called))
    why = (
        f"its arguments, of {_nbytes(event):,} bytes, were deleted for the limit of the recording: "
        "set recording.limit higher"
    )
    event.details = {"unrecorded": why, **event.details}
    event.bodies = [NOTHING]
