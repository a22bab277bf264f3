"""Gets of a channel in another process: items come ahead of the gets that will take them.

::

    get --items here--> taken --next write--> TOOK: the owner forgets the item
     \\--none-----------> GET --answer: the item, and some ahead of the next gets--> here
    half of them taken --> MORE --answer: what is there now--> here

What is kept:

* what is here and was not taken belongs to the channel: it goes back, in order, when somebody else
  wants it, when a batch or a lease is asked for, when this end closes, and when its process dies;
* each get that waits has asked the owner by itself, so that it stands there in its turn; one that
  is served by what another was sent gives its request up;
* only who takes one after the other quickly is sent anything ahead: as much as it takes in a few
  milliseconds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.ends import Key
from rlinf_async.channels.errors import ConnectionLost, MalformedFrame
from rlinf_async.channels.saying import say
from rlinf_async.channels.waitfor import WaitFuture, current_party
from rlinf_async.channels.wire.asking import head_of
from rlinf_async.channels.wire.codec import split
from rlinf_async.channels.wire.fetching import attach
from rlinf_async.channels.wire.protocol import Back, Get, More, Taken
from rlinf_async.channels.wire.transfer import Message

if TYPE_CHECKING:
    from rlinf_async.channels.wire.windows import Windows

HORIZON: Final = 0.005
"""Seconds: what comes ahead is what is taken in this time."""
STREAK: Final = 4
"""Gets in a row that must be so quick before anything comes ahead."""
MAX_AHEAD: Final = 512
TURN_ITEMS: Final = 128
"""So many items are taken in a row, and then the loop has a turn."""
_decode_taken = msgspec.msgpack.Decoder(Taken | int).decode

Said = tuple[list[tuple[int, int]], list[int]]
"""As in `Took`: what was taken, and which answers have arrived."""
Part = tuple[int, Encoded]
"""An item, and the number by which it is taken or given back."""


class WaitingGet(WaitFuture):
    """A get that waits, and has asked."""

    def __init__(self, window: Window) -> None:
        super().__init__(loop=window.loop)
        self.window = window
        self.number = 0
        """of its request; 0 when that was answered"""
        self.said: Said = [], []
        """what its request says beside"""

    def set_result(self, message: Message) -> None:
        """Its request was answered: that serves those who wait, oldest first."""
        self.number = 0
        try:
            self.window.arrived(message, self)
        except MalformedFrame as error:  # the connection ends by it, but forgot who waits
            self.set_exception(error)
            raise

    def serve(self, part: Part) -> None:
        """It has its item."""
        super().set_result(part)


class _More:
    """A request for more, whose answer nobody awaits."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def done(self) -> bool:
        return False

    def set_result(self, message: Message) -> None:
        self._window.more_arrived(message)

    def set_exception(self, error: BaseException) -> None:
        """The end is closed, or the connection is lost: whoever gets will be told."""
        self._window.asks_more = False


class Window:
    """What came ahead for one receiver and one key, and who waits for it."""

    __slots__ = (
        "_answers", "_low", "_ranges", "_since", "_size", "_streak", "_taken", "_windows",
        "asks_more", "closed", "end", "items", "kept", "key", "loop", "run", "saying", "waiting",
    )  # fmt: skip

    def __init__(self, windows: Windows, end: int, key: Key | None) -> None:
        self._windows = windows
        self.loop = windows.loop
        self.end = end
        self.key = key
        self._ranges: list[tuple[int, int]] = []  # as of `Said`, which they are
        self._answers: list[int] = []
        self.saying = False
        """whether that is said with the next write"""
        self.items: deque[Part] = deque()
        self.waiting: deque[WaitingGet] = deque()
        self.asks_more = False
        self.closed = False
        self.kept = False
        """whether it is found where it is wanted back"""
        self.run = 0
        self._since = float("-inf")  # when it last had waited
        self._taken = 0
        self._streak = 0
        self._size = 0
        self._low = -1

    @property
    def idle(self) -> bool:
        return not (self.items or self.waiting or self.asks_more)

    # ---- getting

    async def next(self) -> Part:
        """Wait for an item. Cancelled, it leaves the item in the channel."""
        windows = self._windows
        said = ranges, answers = self.to_say()
        ahead = 0 if self.waiting or self.asks_more else self._ahead()
        get = WaitingGet(self)
        get.said = said
        party = current_party.get()
        question = Get(self.end, self.key, 1, None, party, False, ahead, ranges, answers)
        get.number = windows.connection.post(get, "channel.get", head_of("channel.get", question))
        self.waiting.append(get)
        try:
            part: Part = await get
        except BaseException:
            self._abandon(get)
            raise
        self._since, self._taken = windows.now(), 0
        if windows.connection.closed:  # it has gone back, and others may have it
            raise ConnectionLost(f"connection to {windows.connection.peer!r} was lost")
        return part

    def took(self, index: int) -> None:
        """Somebody has this item."""
        self.run += 1
        self._taken += 1
        ranges = self._ranges
        if ranges and (last := ranges[-1])[0] + last[1] == index:
            ranges[-1] = last[0], last[1] + 1
        else:
            ranges.append((index, 1))
            if not self.saying:
                self._windows.say_soon(self)
        if len(self.items) == self._low:
            self._low = -1
            self._ask_more()

    def refuse(self, index: int, error: BaseException) -> None:
        """This item cannot be read."""
        self._say_soon()
        self._windows.notify("channel.back", Back(self.end, self.key, [(index, 1)], say(error)))

    def lose(self, index: int) -> None:
        """The arrays of this item went with its producer."""
        self._say_soon()
        self._windows.notify("channel.back", Back(self.end, self.key, [(index, 1)], None, True))

    def return_one(self, part: Part) -> None:
        """Whoever had this item does not want it."""
        if not self._windows.connection.closed:
            self._say_soon()
            self.items.appendleft(part)
            self.give_back()

    def give_back(self) -> None:
        """Nothing that is here will be taken."""
        self._low, self._size, self._streak = -1, 0, 0
        if self.items:
            items, self.items = self.items, deque()
            back = Back(self.end, self.key, [(index, 1) for index, _ in items], None)
            self._windows.notify("channel.back", back)

    # ---- what is said in passing

    def to_say(self) -> Said:
        """What was taken, and which answers have arrived: whoever asks for it says it."""
        said = self._ranges, self._answers
        self._ranges, self._answers = [], []
        return said

    def unsaid(self, said: Said) -> None:
        """This was not said after all."""
        self._ranges[:0], self._answers[:0] = said
        self._say_soon()

    def _answered(self, number: int) -> None:
        """This request's answer arrived: it cannot be undone as a whole any more."""
        self._answers.append(number)
        self._say_soon()

    def _say_soon(self) -> None:
        if not self.saying:
            self._windows.say_soon(self)

    # ---- what arrives

    def arrived(self, message: Message, get: WaitingGet) -> None:
        """An answer to this get."""
        parts = self._parts(message)
        waiting = self.waiting
        if len(parts) == len(waiting) == 1 and waiting[0] is get and not (self.items or get.done()):
            waiting.clear()  # as below, without a detour
            self._answers.append(message.number)  # said with what becomes of the item, a turn later
            get.serve(parts[0])
        else:
            if self.closed:  # what came ahead was taken back
                del parts[1:]
            self.items.extend(parts)
            if get in waiting and get is not waiting[0]:
                waiting.remove(get)  # nobody is left waiting without having asked
                waiting.appendleft(get)
            if len(parts) > 1:
                self._low = len(parts) // 2
            self._serve()
            self._answered(message.number)  # once those that it serves have had a turn

    def more_arrived(self, message: Message) -> None:
        """An answer to the request for more."""
        self.asks_more = False
        parts = self._parts(message)
        if not self.closed:
            self.items.extend(parts)
            if 2 * len(parts) >= self._size:
                self._low = len(self.items) // 2
            self._serve()
        self._answered(message.number)

    # ---- inside

    def _parts(self, message: Message) -> list[Part]:
        try:
            taken = _decode_taken(message.head)
            if isinstance(taken, int):
                return [(taken, message.body or Encoded(b""))]
            parts = split(taken.sizes, message.body)
            if taken.left:
                attach(parts, taken.left)
            return (
                [(taken.first, parts[0])] if len(parts) == 1 else [*enumerate(parts, taken.first)]
            )
        except msgspec.DecodeError as error:
            raise MalformedFrame(f"the answer to a get: {error}") from error

    def _serve(self) -> None:
        while self.waiting and self.items:
            get = self.waiting.popleft()
            if get.number:
                self._windows.give_up(get)
            if not get.done():
                get.serve(self.items.popleft())

    def _abandon(self, get: WaitingGet) -> None:
        if get in self.waiting:
            self.waiting.remove(get)
        if not get.done() or get.cancelled():
            if get.number:
                self._windows.give_up(get)
        elif get.exception() is None:
            self.return_one(get.result())

    def _ahead(self) -> int:
        """How many items may come ahead: as many as are taken soon."""
        used = self._windows.now() - self._since  # without what it waited: that says nothing of it
        pace = max(used, 1e-9) / max(1, self._taken)
        if pace > HORIZON:
            self._streak = self._size = 0
            return 0
        self._streak += 1
        if self._streak < STREAK:
            return 0
        self._size = min(MAX_AHEAD, 2 * self._size + 8, int(HORIZON / pace))
        return self._size

    def _ask_more(self) -> None:
        if self.waiting or self.asks_more or self.closed or not self._windows.keep(self):
            return
        if ahead := self._ahead():
            self.asks_more = True
            more = More(self.end, self.key, ahead, current_party.get())
            self._windows.ask("channel.more", more, _More(self))
