"""Producers that a consumer does not reach, or no longer: no get waits long for them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from rlinf_async.channels import Channel, WireError
from rlinf_async.channels.wire import Direct
from rlinf_async.channels.wire import direct as direct_module
from rlinf_async.channels.wire.session.endpoint import Server, serve
from tests.channels.wire.direct_kit import (
    Item,
    Party,
    World,
    holding_fetches,
    item,
    items,
    world,
)
from tests.channels.wire.harness import SECRET, until

NEVER = 1000.0
THROUGH_OWNER = "large arrays come through the owner of their channel"


@pytest.fixture
def silent_address() -> Iterator[str]:
    """An address that takes connections and says nothing, as behind some firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


async def producers_at(one: World, address: str, count: int) -> list[Party]:
    made = [await one.producer(f"producer {number}") for number in range(count)]
    for each in made:
        assert each.direct is not None
        each.direct.addresses[:] = [address]
    return made


async def put_and_get(channel: Channel[Item], put: list[Party], consumer: Party) -> None:
    """One item of each of these, got by the consumer."""
    receiver = consumer.receiver(channel)
    for number, each in enumerate(put):
        with each.sender(channel) as sender:
            await sender.put(item(number))
        assert (await receiver.get()).check() == number


async def test_one_get_waits_for_a_host_that_answers_nothing_and_no_other(
    silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = items()
    with channel.sender.open():
        async with world() as one:
            put = await producers_at(one, silent_address, 5)
            consumer = await one.consumer(handshake_timeout=NEVER)
            monkeypatch.setattr(direct_module, "WAIT_SECONDS", 0.0)
            await put_and_get(channel, put[:1], consumer)
            monkeypatch.setattr(direct_module, "WAIT_SECONDS", NEVER)
            for _ in range(3):
                await put_and_get(channel, put, consumer)
            assert consumer.got == (0, 16)


async def test_it_is_tried_again_while_gets_go_on_through_the_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_module, "OUT_OF_REACH_SECONDS", 0.0)
    channel = items()
    with channel.sender.open():
        async with world() as one:
            [producer] = put = await producers_at(one, "tcp://127.0.0.1:1", 1)
            with socket.create_server(("127.0.0.1", 0)) as unused:
                there = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
            assert producer.direct is not None
            producer.direct.addresses[:] = [there]
            consumer = await one.consumer(patience=0)
            assert consumer.direct is not None
            with caplog.at_level(logging.WARNING):
                await put_and_get(channel, put, consumer)
            assert caplog.text.count(THROUGH_OWNER) == 1
            await producer.direct._listen(there)
            await put_and_get(channel, put, consumer)  # begins to connect
            [link] = consumer.direct._links.values()
            assert await link is not None
            await put_and_get(channel, put, consumer)
            assert consumer.got == (1, 2)


async def test_a_connection_that_is_lost_in_the_middle_of_a_payload_is_not_tried_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = items()
    with channel.sender.open():
        async with world() as one:
            producer, consumer = await one.producer(), await one.consumer()
            assert producer.direct is not None
            sender, receiver = producer.sender(channel), consumer.receiver(channel)
            await sender.put(item(0))
            with caplog.at_level(logging.WARNING), holding_fetches(producer) as held:
                getting = asyncio.create_task(receiver.get())
                await until(lambda: held)
                for server in producer.direct._servers:
                    for each in list(server.connections):
                        each.abort("large messages do not get through")
                await until(lambda: len(held) == 2)
                # (the second is the owner's)
            for request in held[1:]:
                producer.direct.answer(request)
            assert (await getting).check() == 0
            await put_and_get(channel, [producer] * 3, consumer)
            assert consumer.got == (0, 4)
            assert caplog.text.count(THROUGH_OWNER) == 1
            assert "large messages do not get through" in caplog.text


async def test_a_worker_that_cannot_listen_at_one_of_its_addresses_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refusing(address: str, *args: object, **options: object) -> Server:
        if not address.startswith("tcp://"):
            raise WireError("no such sockets here")
        return await serve(address, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(direct_module, "serve", refusing)
    async with world() as one:
        connection = await one.owner.join("worker")
        with caplog.at_level(logging.WARNING):
            made = await Direct.of_worker(connection, SECRET, name="worker")
        assert made is not None
        assert [address.rpartition(":")[0] for address in made.addresses] == ["tcp://127.0.0.1"]
        assert "worker: no worker will fetch large arrays at @rlinf-" in caplog.text
        await made.close()
        connection.close()
