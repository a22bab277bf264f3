"""What counts as far, and what is put and got over a connection that does."""

from __future__ import annotations

import secrets
import socket

import numpy as np
import pytest

from rlinf_async.channels import Channel
from rlinf_async.channels.wire.session import distance
from tests.channels.wire.direct_kit import ELEMENTS, Item
from tests.channels.wire.harness import wired

COUNT = 40


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system does not say")
async def test_the_system_says_how_far_the_other_side_of_tcp_is() -> None:
    async with wired(address="tcp://127.0.0.1:0") as owner:
        near = await owner.join("worker")
        assert 0 < near.round_trip < 1
        assert near.local_host == "127.0.0.1"


async def test_a_name_without_a_file_is_an_address_of_this_host() -> None:
    async with wired(address=f"@rlinf-test-{secrets.token_hex(8)}") as owner:
        connection = await owner.join("worker")
        assert connection.local
        assert connection.round_trip == 0
        assert connection.local_host is None


async def test_far_puts_of_arrays_do_not_ask_and_are_not_changed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distance, "FAR_SECONDS", 0.0)
    channel = Channel(Item, name="items", capacity=2 * COUNT)
    async with wired(address="tcp://127.0.0.1:0") as owner:
        connection = await owner.join("worker")
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        values = np.empty(ELEMENTS, np.int64)
        for number in range(COUNT):
            values[:] = number
            await sender.put(Item(number, values))
        asked = channel.statistics().credit_waits
        await sender.flush()
        got = [(await receiver.get()).check() for _ in range(COUNT)]
        assert got == [*range(COUNT)]
        assert asked < COUNT // 4
