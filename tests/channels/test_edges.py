"""What went over each edge of a channel, by who put or took it."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import Channel, current_party
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.statistics import MAX_EDGES, OTHER_PARTIES, Edge, Edges
from rlinf_async.channels.wire.session.connection import traffic_of
from tests.channels.wire.harness import remote_pair, until, wired

LARGE = 100_000


async def test_items_and_bytes_are_counted_on_their_way_in_and_out() -> None:
    channel = Channel(bytes, name="blobs", capacity=8)
    async with remote_pair(channel) as (sender, receiver):
        for _ in range(3):
            await sender.put(bytes(100))
        await sender.flush()
        current_party.set("Actor[0].train")
        await receiver.get_batch(weight=2)
        await receiver.get()
        seen = statistics_of(channel.queue)
        assert [(edge.end, edge.party, edge.items) for edge in seen.edges] == [
            ("sender", "w", 3),
            ("receiver", "Actor[0].train", 3),
        ]
        put, taken = seen.edges
        assert put.nbytes == taken.nbytes == seen.nbytes == 3 * 102
        assert (await sender.statistics()).edges == seen.edges


async def test_copies_and_what_needed_none_are_counted_by_producer() -> None:
    channel = Channel(NDArray[np.uint8], name="arrays", capacity=8)
    async with remote_pair(channel) as (sender, receiver):
        for _ in range(4):
            await sender.put(np.zeros(LARGE, np.uint8))
            await receiver.get()
        [edge] = [edge for edge in statistics_of(channel.queue).edges if edge.end == "sender"]
        assert edge.shared + edge.copied == edge.items == 4
        assert edge.shared >= 2
        assert edge.nbytes > 4 * LARGE


async def test_a_connection_counts_bytes_and_copies_on_both_sides() -> None:
    channel = Channel(NDArray[np.uint8], name="arrays", capacity=8)
    async with wired() as owner:
        connection = await owner.join("producer")
        sender = owner.sender(channel, connection)
        for _ in range(4):
            await sender.put(np.zeros(LARGE, np.uint8))
        await sender.flush()
        [server_side] = owner.server.connections
        here, there = traffic_of(server_side), traffic_of(connection)
        assert (here.peer, there.peer) == ("producer", "owner")
        assert there.sent_shared + there.sent_copied == 4
        await until(
            lambda: traffic_of(server_side).received_bytes == traffic_of(connection).sent_bytes
        )
        assert here.received_shared == there.sent_shared >= 2
        assert (here.cuts, here.reconnecting, here.unsent) == (0, False, 0)
        connection.close()


async def test_what_stays_in_the_owners_process_has_no_edge() -> None:
    channel = Channel(int, name="numbers")
    await channel.sender.put(1)
    await channel.receiver.get()
    assert statistics_of(channel.queue).edges == ()


def test_only_so_many_edges_are_told_apart() -> None:
    edges = Edges()
    for number in range(MAX_EDGES + 10):
        edges.put(f"w{number}", Encoded(b"x"))
    seen = edges.seen()
    assert len(seen) == MAX_EDGES + 1
    assert seen[-1] == Edge(end="sender", party=OTHER_PARTIES, items=10, nbytes=10)


def test_what_was_seen_does_not_change_later() -> None:
    edges = Edges()
    edges.take("w", 1, 10)
    before = edges.seen()
    edges.take("w", 2, 20)
    edges.put_many("w", 5, 50)
    edges.asked("w")
    assert before == (Edge(end="receiver", party="w", items=1, nbytes=10),)
    assert edges.seen() == (
        Edge(end="sender", party="w", items=5, nbytes=50, credit_waits=1),
        Edge(end="receiver", party="w", items=3, nbytes=30),
    )


async def test_puts_into_lent_room_are_counted_and_those_that_had_to_ask() -> None:
    channel = Channel(int, name="numbers", capacity=8)
    async with remote_pair(channel) as (sender, receiver):
        for number in range(200):
            putting = asyncio.create_task(sender.put(number))
            assert await receiver.get() == number
            await putting
        await sender.flush()
        seen = statistics_of(channel.queue)
        put, taken = seen.edges
        assert put.items == taken.items == 200
        assert put.credit_waits == seen.credit_waits
