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
from rlinf_async.channels.wire.window import WaitingGet, Window

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
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self._all: dict[tuple[int, Key | None], Window] = {}
        self._saying: list[Window] = []
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
            get.window.unsaid(get.said)  # then nothing of it was said

    def notify(self, kind: str, meta: Any) -> None:
        """Tell the owner, after all that was told before; to a lost one there is nothing to say."""
        if not self.connection.closed:
            self.connection.notify(kind, meta)

    def say_soon(self, window: Window) -> None:
        """Say what there is to say of this window with the next write."""
        window.saying = True
        if not self._saying:
            self.outbox.collect(self._say)
        self._saying.append(window)

    # ---- inside

    def _say(self) -> None:
        saying, self._saying = self._saying, []
        for window in saying:
            window.saying = False
            ranges, answers = window.to_say()
            if ranges or answers:
                self.notify("channel.took", Took(window.end, window.key, ranges, answers))

    def _wanted(self, request: Request[Wanted]) -> None:
        window = self._all.get((request.meta.end, request.meta.key))
        if window is not None:
            window.give_back()

    def _forget_idle(self) -> None:
        for at, window in list(self._all.items()):
            if window.idle and not window.saying:
                window.kept = False
                del self._all[at]

    def _lost(self, connection: Connection, reason: str) -> None:
        for window in self._all.values():
            window.items.clear()
        self._saying.clear()
