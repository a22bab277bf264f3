"""Messages that were not given to the transport yet, lane by lane. Pure: no socket, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rlinf_async.channels.wire.frames.framing import CHUNK_BYTES, Bytes, is_request
from rlinf_async.channels.wire.frames.messages import Outgoing

BATCH_BYTES = CHUNK_BYTES


class Backlog:
    """Two lanes; what is in ``control`` goes before what is in ``data``."""

    __slots__ = ("control", "data")

    def __init__(self) -> None:
        self.control: deque[Bytes] = deque()
        """whole frames"""
        self.data: deque[Outgoing | bytes] = deque()
        """messages: small ones as the frame that they are"""

    def withdraw(self, number: int) -> bool:
        """Forget what was not taken of this request; whether none of it was."""
        for message in self.data:
            if isinstance(message, bytes):
                if is_request(message, number):
                    self.data.remove(message)
                    return True
            elif message.number == number and message.request:
                self.data.remove(message)
                return not message.begun
        return False

    def take(self, worked: Callable[[], int], *, only_control: bool) -> tuple[list[Bytes], int]:
        """The next frames and their bytes: all of control, and data of about `BATCH_BYTES`, with
        what was ``worked`` for it beside."""
        batch: list[Bytes] = list(self.control)
        self.control.clear()
        size = sum(map(len, batch))
        control = size  # however much it is, data goes on too
        data = self.data
        while data and not only_control and (full := control - worked() + BATCH_BYTES) > size:
            while size < full and data and isinstance(first := data[0], bytes):
                batch.append(first)
                size += len(first)
                data.popleft()
            if size >= full or not data or isinstance(first := data[0], bytes):
                break
            frame = first.next_frame()
            if frame is None:
                data.popleft()
                continue
            if not frame:  # it waits for a word of the peer; its turn comes when that is read
                break
            batch += frame
            size += sum(map(len, frame))
        return batch, size
