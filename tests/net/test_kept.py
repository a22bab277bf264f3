"""What may have to be written again is the end of the stream, from any byte that is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.wire.frames.framing import Bytes
from rlinf_async.channels.wire.session.unacknowledged import MAX_KEPT_BYTES, Kept

batches = st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=4), max_size=8)


def size(batch: list[bytes]) -> int:
    return sum(map(len, batch))


@given(batches, st.lists(st.integers(0, 40), max_size=6))
def test_what_goes_out_again_is_exactly_what_did_not_arrive(
    written: list[list[bytes]], said: list[int]
) -> None:
    kept, stream = Kept(), b""
    for index, batch in enumerate(written):
        parts: list[Bytes] = [*batch]
        kept.add(parts, size(batch))
        stream += b"".join(batch)
        if index < len(said) and said[index] <= len(stream):
            kept.forget(said[index])
    for arrived in range(kept.arrived, len(stream) + 1):
        assert b"".join(kept.after(arrived)) == stream[arrived:]
    assert kept.written == len(stream)


def test_nobody_can_have_more_than_was_sent_or_less_than_was_said() -> None:
    kept = Kept()
    kept.add([b"12345"], 5)
    with pytest.raises(MalformedFrame, match="6 bytes arrived, though 5 were sent"):
        kept.forget(6)
    kept.forget(4)
    with pytest.raises(MalformedFrame, match="3 bytes arrived, though it was said to be more"):
        kept.after(3)


def test_it_is_full_until_enough_has_arrived() -> None:
    kept = Kept()
    kept.add([bytes(MAX_KEPT_BYTES - 1)], MAX_KEPT_BYTES - 1)
    assert not kept.full
    kept.add([b"x"], 1)
    assert kept.full
    kept.forget(1)
    assert not kept.full
