"""How much this process has moved over its connections: for who asks whether anything goes on.

What is said of heartbeats, requests and answers is not counted, and a small item, which one frame
holds, is counted by its channel. A large one takes its time, in which no channel changes.
"""

from __future__ import annotations

from typing import Final


class Movement:
    """Counts up; what it counts from is of no interest."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """bytes of large messages that have arrived or were copied to shared memory, and sockets
        that were made, or made again after a cut"""


movement: Final = Movement()
"""of this process"""
