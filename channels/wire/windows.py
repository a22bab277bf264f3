"""All windows of one connection: for which receiver and key each is, and what they say together.

What was taken, and which answers have arrived, is said with the next get that asks the owner, or
with the next write, whichever comes first: a get that is withdrawn before it was sent gives back
what it had to say.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from rlinf_async.channels.ends import Key
from rlinf_async.channels.wire.asking import head_of
from rlinf_async.channels.wire.protocol import Took, Wanted
from rlinf_async.channels.wire.window import Said, WaitingGet, Window

if TYPE_CHECKING:
    from rlinf_async.channels.wire.connection import Connection
    from rlinf_async.channels.wire.router import Request

MAX_KEYS: Final = 256
"""With so many windows, those that are idle are forgotten before another one is made."""


class Windows:
    """All windows of one connection. See `of`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outbox = connection.outbox
        self.now = asyncio.get_running_loop().time
        self._all: dict[tuple[int, Key | None], Window] = {}
        self._took: dict[Window, Said] = {}
        connection.answers.add_sync("channel.wanted", Wanted, self._wanted)
        connection.on_close(self._lost, first=True)

    @classmethod
    def of(cls, connection: Connection) -> Windows:
        """Those of this connection."""
        found: Windows | None = connection.parts.get(cls)
        if found is None:
            found = connection.parts[cls] = cls(connection)
        return found

    def find(self, end: int, key: Key | None) -> Window:
        """That of this receiver and key; made if there is none."""
        window = self._all.get((end, key))
        if window is None:
            if len(self._all) >= MAX_KEYS:
                self._forget_idle()
            window = self._all[end, key] = Window(self, end, key)
            window.kept = True
        return window

    def close(self, end: int) -> None:
        """This receiver is closed."""
        for at, window in list(self._all.items()):
            if at[0] == end:
                window.closed = True
                window.give_back()
                window.kept = False
                del self._all[at]

    def give_back(self, end: int, key: Key | None) -> None:
        """A batch or a lease is asked for: what came ahead must be in the channel."""
        window = self._all.get((end, key))
        if window is not None:
            window.give_back()

    # ---- for windows

    def keep(self, window: Window) -> bool:
        """Find it from now on, if it was forgotten; whether it is still that of its key. Only such
        a one may ask ahead of its gets: what comes must be found when it is wanted back."""
        if not window.kept:
            window.kept = self._all.setdefault((window.end, window.key), window) is window
        return window.kept

    def ask(self, kind: str, meta: Any, pending: Any) -> int:
        """Ask the owner; the request's number."""
        return self.connection.post(pending, kind, head_of(kind, meta))

    def give_up(self, get: WaitingGet) -> None:
        """Nobody wants the answer to its request."""
        number, get.number = get.number, 0
        if not self.connection.closed and self.connection.give_up(number):
            ranges, answers = self._said_of(get.window)  # then nothing of it was said
            ranges[:0], answers[:0] = get.said

    def notify(self, kind: str, meta: Any) -> None:
        """Tell the owner, after all that was told before; to a lost one there is nothing to say."""
        if not self.connection.closed:
            self.connection.notify(kind, meta)

    def took(self, window: Window, index: int) -> None:
        """Say so with the next write."""
        ranges, _ = self._took.get(window) or self._said_of(window)
        if ranges:
            first, length = ranges[-1]
            if first + length == index:
                ranges[-1] = first, length + 1
                return
        ranges.append((index, 1))

    def answered(self, window: Window, number: int) -> None:
        """This request's answer arrived: it cannot be undone as a whole any more."""
        self._said_of(window)[1].append(number)

    def to_say(self, window: Window) -> Said:
        """What there is to say of this window, for the request that says it in passing."""
        return self._took.pop(window, None) or ([], [])

    # ---- inside

    def _said_of(self, window: Window) -> Said:
        said = self._took.get(window)
        if said is None:
            if not self._took:
                self.outbox.collect(self._say)
            said = self._took[window] = [], []
        return said

    def _say(self) -> None:
        took, self._took = self._took, {}
        for window, (ranges, numbers) in took.items():
            self.notify("channel.took", Took(window.end, window.key, ranges, numbers))

    def _wanted(self, request: Request[Wanted]) -> None:
        window = self._all.get((request.meta.end, request.meta.key))
        if window is not None:
            window.give_back()

    def _forget_idle(self) -> None:
        for at, window in list(self._all.items()):
            if window.idle and window not in self._took:
                window.kept = False
                del self._all[at]

    def _lost(self, connection: Connection, reason: str) -> None:
        for window in self._all.values():
            window.items.clear()
        self._took.clear()
