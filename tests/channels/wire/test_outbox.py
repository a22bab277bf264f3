"""When what is said is written, and how many writes that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from rlinf_async.channels.wire.frames import CONTROL, DATA, HEADER, FrameType, MessageReader
from rlinf_async.channels.wire.session.outbox import Outbox


class Written(asyncio.WriteTransport):
    """Keeps what is written to it, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.writes.append(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    @property
    def heads(self) -> list[list[bytes]]:
        """The heads of the messages of each write."""
        return [[message.head for message in MessageReader().feed(one)] for one in self.writes]


def outbox() -> tuple[Outbox, Written]:
    made, written = Outbox(asyncio.get_running_loop()), Written()
    made.attach(written)
    return made, written


def tell(outbox: Outbox, head: bytes, lane: int = DATA) -> None:
    outbox.send(FrameType.NOTICE, 0, head, None, lane, what="test")


async def turn() -> None:
    await asyncio.sleep(0)


async def test_the_first_message_of_a_turn_is_written_at_once_the_others_in_one_write() -> None:
    box, written = outbox()
    await turn()
    tell(box, b"1")
    assert written.heads == [[b"1"]]
    for head in (b"2", b"3", b"4"):
        tell(box, head)
    assert written.heads == [[b"1"]]
    await turn()
    assert written.heads == [[b"1"], [b"2", b"3", b"4"]]


async def test_a_long_turn_is_written_as_it_goes_on_and_in_order() -> None:
    box, written = outbox()
    await turn()
    heads = [b"%04d" % number for number in range(1000)]
    for head in heads:
        tell(box, head)
    assert 2 < len(written.writes) < 20
    await turn()
    assert [head for heads in written.heads for head in heads] == heads
    tell(box, b"next")
    assert written.heads[-1] == [b"next"]


async def test_answers_to_what_was_read_together_are_written_together() -> None:
    box, written = outbox()
    await turn()
    box.held = True
    tell(box, b"1")
    tell(box, b"2")
    assert written.heads == []
    box.release()
    assert written.heads == [[b"1", b"2"]]
    tell(box, b"3")
    assert written.heads[-1] == [b"3"]


async def test_what_was_collected_goes_first_and_in_the_same_write() -> None:
    box, written = outbox()
    await turn()
    box.collect(lambda: tell(box, b"collected", CONTROL))
    tell(box, b"said")
    assert written.heads == [[b"collected", b"said"]]
    await turn()
    assert len(written.writes) == 1


async def test_control_goes_before_data_that_waits() -> None:
    box, written = outbox()
    await turn()
    tell(box, b"1")
    tell(box, b"data")
    tell(box, b"control", CONTROL)
    await turn()
    assert written.heads == [[b"1"], [b"control", b"data"]]


async def test_nothing_is_written_while_the_transport_holds_enough() -> None:
    box, written = outbox()
    await turn()
    box.pause()
    tell(box, b"1")
    await turn()
    assert (written.heads, box.waiting) == ([], 1)
    box.resume()
    assert written.heads == [[b"1"]]


async def test_a_request_can_be_withdrawn_until_it_is_written() -> None:
    box, written = outbox()
    await turn()
    box.pause()
    box.send(FrameType.REQUEST, 7, b"asked", None, DATA, what="test")
    box.send(FrameType.REPLY, 7, b"answered", None, DATA, what="test")
    assert box.withdraw(7)
    assert not box.withdraw(7)
    box.resume()
    assert written.heads == [[b"answered"]]


async def test_what_was_collected_and_cannot_be_said_holds_nothing_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box, written = outbox()
    await turn()

    def fails() -> None:
        raise LookupError("it does not fit")

    box.collect(fails)
    box.collect(lambda: tell(box, b"collected"))
    tell(box, b"1")
    assert written.heads == [[b"collected", b"1"]]
    assert "LookupError: it does not fit" in caplog.text


async def test_all_that_was_written_is_counted_and_kept() -> None:
    box, written = outbox()
    await turn()
    for head in (b"1", b"2", b"3"):
        tell(box, head)
    await turn()
    assert box.sent_bytes == 3 * (HEADER.size + 1) == sum(map(len, written.writes))
    again = Written()
    box.cut()
    box.attach(again, arrived=HEADER.size + 1)
    assert again.heads == [[b"2", b"3"]]
