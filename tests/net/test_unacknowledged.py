"""What may have to be written again is the end of the stream, from any byte that is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.wire.frames import Bytes
from rlinf_async.channels.wire.session.outbox import MAX_UNACKNOWLEDGED_BYTES, Unacknowledged

batches = st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=4), max_size=8)


def size(batch: list[bytes]) -> int:
    return sum(map(len, batch))


@given(batches, st.lists(st.integers(0, 40), max_size=6))
def test_what_goes_out_again_is_exactly_what_did_not_arrive(
    written: list[list[bytes]], said: list[int]
) -> None:
    unacknowledged, stream = Unacknowledged(), b""
    for index, batch in enumerate(written):
        parts: list[Bytes] = [*batch]
        unacknowledged.add(parts, size(batch))
        stream += b"".join(batch)
        if index < len(said) and said[index] <= len(stream):
            unacknowledged.forget(said[index])
    for arrived in range(unacknowledged.arrived, len(stream) + 1):
        assert b"".join(unacknowledged.after(arrived)) == stream[arrived:]
    assert unacknowledged.written == len(stream)


def test_nobody_can_have_more_than_was_sent_or_less_than_was_said() -> None:
    unacknowledged = Unacknowledged()
    unacknowledged.add([b"12345"], 5)
    with pytest.raises(MalformedFrame, match="6 bytes arrived, though 5 were sent"):
        unacknowledged.forget(6)
    unacknowledged.forget(4)
    with pytest.raises(MalformedFrame, match="3 bytes arrived, though it was said to be more"):
        unacknowledged.after(3)


def test_it_is_full_until_enough_has_arrived() -> None:
    unacknowledged = Unacknowledged()
    unacknowledged.add([bytes(MAX_UNACKNOWLEDGED_BYTES - 1)], MAX_UNACKNOWLEDGED_BYTES - 1)
    assert not unacknowledged.full
    unacknowledged.add([b"x"], 1)
    assert unacknowledged.full
    unacknowledged.forget(1)
    assert not unacknowledged.full
