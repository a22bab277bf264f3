"""Arrays that are made in shared memory, and cross without a copy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.channels.wire.codec import encode
from rlinf_async.channels.wire.slab import View, view_of
from tests.channels.wire.harness import wired

SIZE = 300_000


class Item(msgspec.Struct):
    values: NDArray[np.float32]


def place(array: NDArray[Any]) -> View:
    """The part of shared memory that an array lies in."""
    below: Any = array
    while isinstance(below, np.ndarray):
        below = below.base
    found = view_of(below)
    assert found is not None
    return found


def floats(value: float) -> NDArray[np.float32]:
    made = shared_bytes(4 * SIZE)
    assert made is not None
    values = made.view(np.float32)
    values[:] = value
    return values


async def test_it_arrives_where_it_was_written() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=4)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        for value in (1.0, 2.0):
            written = floats(value)
            await sender.put(Item(written))
            taken = await receiver.get()
            assert (taken.values == value).all()
            assert place(taken.values).loan.slab.token == place(written).loan.slab.token
            assert place(taken.values).offset == place(written).offset
        assert connection.memory.sent_copied == 0


def test_a_part_of_it_is_copied_when_it_travels() -> None:
    values = floats(1.0)
    (whole,) = encode(Item(values)).buffers
    (part,) = encode(Item(values[2:])).buffers
    assert view_of(whole) is not None
    assert view_of(part) is None
    assert len(part) == 4 * (SIZE - 2)


@pytest.mark.parametrize("size", [0, -1])
def test_no_bytes_are_no_array(size: int) -> None:
    assert shared_bytes(size) is None
