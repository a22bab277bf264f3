"""What becomes of a connection between a cut and the next socket, and when there is none."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from rlinf_async.channels import Channel, ChannelFailed, ConnectionLost, HandshakeFailed, Receiver
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Router, connect
from rlinf_async.channels.wire.session.link import Handshake, Terms
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import PATIENCE, SECRET, until, wired
from tests.net.cutter import cutter
from tests.net.kit import Far, far, small_talk


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes while it is cut, or is to see an end, has the time of a busy machine for it."""
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.GRACE_SECONDS", PATIENCE)


async def cut(one: Far) -> None:
    """Cut the network for the first time and keep it cut, until both sides know."""
    [server_side] = one.owner.server.connections
    one.net.refuse = True
    one.net.cut_all()
    await until(lambda: one.connection.reconnection.cuts and server_side.reconnection.cuts)


async def hold_until_lost(one: Far, receiver: Receiver[int]) -> None:
    """Hold an item, be cut off, and wait for another."""
    async with receiver.lease():
        await cut(one)
        await receiver.get()


async def introduce(one: Far, handshake: Handshake) -> None:
    """Come to the owner with this, over a socket of one's own."""
    reader, writer = await asyncio.open_unix_connection(one.owner.path)
    try:
        while not handshake.done:
            writer.write(handshake.take_outgoing())
            handshake.feed(await reader.read(4096))
    finally:
        writer.close()
        await writer.wait_closed()


def remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


async def test_what_is_asked_while_it_is_cut_waits_and_is_done_once() -> None:
    channel = Channel(int, name="numbers")
    async with far() as one:
        sender = one.owner.sender(channel, one.connection)
        await cut(one)
        putting = [asyncio.create_task(sender.put(number)) for number in range(5)]
        await wait_all_blocked()
        assert statistics_of(channel.queue).puts == 0
        one.net.refuse = False
        await asyncio.gather(*putting)
        assert await channel.receiver.get_batch(weight=5) == list(range(5))
        assert not one.connection.reconnecting
        assert one.connection.reconnection.cuts == 1


async def test_what_is_cancelled_while_it_is_cut_leaves_no_trace() -> None:
    channel = Channel(int, name="numbers")
    async with far() as one:
        sender = one.owner.sender(channel, one.connection)
        receiver = one.owner.receiver(channel, one.connection)
        getting = asyncio.create_task(receiver.get())
        await until(lambda: statistics_of(channel.queue).waiting_getters)
        await cut(one)
        putting = asyncio.create_task(sender.put(1))
        await wait_all_blocked()
        for task in (getting, putting):
            task.cancel()
        await asyncio.gather(getting, putting, return_exceptions=True)
        one.net.refuse = False
        await until(lambda: not one.connection.reconnecting)
        await sender.put(2)
        assert await receiver.get() == 2
        assert statistics_of(channel.queue).depth == 0


async def test_a_lease_is_held_across_a_cut() -> None:
    channel = Channel(int, name="numbers")
    async with far() as one:
        receiver = one.owner.receiver(channel, one.connection)
        await channel.sender.put(7)
        async with receiver.lease() as batch:
            await cut(one)
            assert [*batch] == [7]
            one.net.refuse = False
        await until(lambda: not statistics_of(channel.queue).leases_out)
        assert statistics_of(channel.queue).redelivered == 0
        assert statistics_of(channel.queue).depth == 0


async def test_past_its_patience_each_side_gives_up_and_leases_go_back() -> None:
    channel = Channel(int, name="numbers")
    async with far(patience=0.2) as one:
        receiver = one.owner.receiver(channel, one.connection)
        await channel.sender.put(7)
        with pytest.raises(ConnectionLost, match=r"; it was not resumed within 0\.2 s"):
            await hold_until_lost(one, receiver)
        name, reason = await one.owner.lost.get()
        assert name == "worker"
        assert reason.endswith("; it was not resumed within 0.2 s")
        seen = statistics_of(channel.queue)
        assert (seen.depth, seen.leases_out) == (1, 0)


async def test_the_shorter_patience_of_both_sides_counts() -> None:
    async with far(patience=9.0) as longer, far(patience=0.5) as shorter:
        for one, seconds in ((longer, 9.0), (shorter, 0.5)):
            assert one.connection.reconnection.patience == seconds
            await until(partial(bool, one.owner.server.connections))
            [server_side] = one.owner.server.connections
            assert server_side.reconnection.patience == seconds


async def test_without_patience_a_cut_ends_it_at_once() -> None:
    async with far(patience=0) as one:
        await until(lambda: one.owner.server.connections)
        one.net.cut_all()
        await until(lambda: one.connection.closed)
        assert (await one.owner.lost.get())[0] == "worker"
        assert one.net.sockets == 1
        with pytest.raises(ConnectionLost, match=r"closed it or died$"):
            one.connection.notify("anything", None)


async def test_on_one_host_a_cut_counts_as_death_where_the_system_cannot_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.pidfd_open")
    async with far() as one:
        await until(lambda: one.owner.server.connections)
        one.net.cut_all()
        await until(lambda: one.connection.closed)
        assert (await one.owner.lost.get())[0] == "worker"
    async with far(tcp=True) as one:
        one.net.cut_all()
        await small_talk(one)
        assert one.connection.reconnection.cuts == 1


async def test_where_nobody_listens_any_more_the_peer_is_gone_at_once() -> None:
    for tcp in (True, False):
        async with far(tcp=tcp) as one:
            one.net.listener.close()
            if not tcp:
                remove(one.net.address)
            one.net.cut_all()
            await one.connection.wait_closed()
            with pytest.raises(ConnectionLost, match=r"died; cannot connect to .*is the process"):
                one.connection.notify("anything", None)


async def test_another_process_at_the_same_address_is_not_taken_for_the_first() -> None:
    async with far() as one, wired() as other:
        one.net.server = str(other.path)
        one.net.cut_all()
        await one.connection.wait_closed()
        with pytest.raises(ConnectionLost, match="does not know its connection"):
            one.connection.notify("anything", None)


async def test_a_peer_that_was_given_up_is_told_so_when_it_comes_back() -> None:
    async with far() as one:
        await cut(one)
        [server_side] = one.owner.server.connections
        server_side.abort("a test")
        one.net.refuse = False
        await one.connection.wait_closed()
        with pytest.raises(ConnectionLost, match="does not know its connection"):
            one.connection.notify("anything", None)


async def test_a_peer_comes_back_before_its_old_socket_is_known_to_be_cut() -> None:
    async with far(tcp=True) as one:
        await until(lambda: one.owner.server.connections)
        one.net.cut_clients()
        await small_talk(one)
        assert one.connection.reconnection.cuts == 1
        assert len(one.owner.server.connections) == 1


async def test_who_does_not_know_the_secret_cannot_disturb_a_connection() -> None:
    async with far() as one:
        await until(lambda: one.owner.server.connections)
        [server_side] = one.owner.server.connections
        forged = Handshake(
            "client", b"wrong" * 8, "worker", terms=Terms(server_side.number, 0, 10.0)
        )
        with pytest.raises(HandshakeFailed, match="secret is wrong"):
            await introduce(one, forged)
        await small_talk(one)
        assert server_side.reconnection.cuts == 0


async def test_a_peer_of_another_name_cannot_take_a_connection_over() -> None:
    async with far() as one:
        await until(lambda: one.owner.server.connections)
        [server_side] = one.owner.server.connections
        other = Handshake("client", SECRET, "somebody", terms=Terms(server_side.number, 0, 10.0))
        with pytest.raises(HandshakeFailed, match="does not know its connection"):
            await introduce(one, other)
        assert server_side.reconnection.cuts == 0


async def test_closing_while_it_is_cut_leaves_no_task_and_no_socket() -> None:
    async with far(patience=0.3) as one:
        await cut(one)
        one.connection.close()
        await one.connection.wait_closed()
        assert not one.connection.reconnecting


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("tcp", [False, True])
async def test_what_was_said_before_a_connection_closed_while_it_was_cut_arrives(tcp: bool) -> None:
    channel = Channel(int, name="numbers")
    async with far(tcp=tcp) as one:
        sender = one.owner.sender(channel, one.connection)
        await sender.put(1)
        await cut(one)
        sender.close()
        one.connection.close("it has done its work")
        await wait_all_blocked()
        assert not one.connection.closed
        one.net.refuse = False
        await one.connection.wait_closed()
        assert await one.owner.lost.get() == ("worker", "worker closed it: it has done its work")
        channel.sender.close()
        assert [number async for number in channel.receiver] == [1]


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("fails", [False, True])
async def test_an_end_that_is_closed_in_the_moment_of_a_cut_is_closed(fails: bool) -> None:
    channel = Channel(int, name="numbers")
    async with far() as one:
        sender = one.owner.sender(channel, one.connection)
        await sender.put(1)
        await sender.flush()
        one.net.cut_all()  # this side does not know yet
        if fails:
            sender.fail(ValueError("a test"))
        sender.close()
        one.connection.close()
        await one.connection.wait_closed()
        channel.sender.close()
        async with asyncio.timeout(PATIENCE):
            if fails:
                with pytest.raises(ChannelFailed, match="a test"):
                    await channel.receiver.get_batch(weight=2)
            else:
                assert [number async for number in channel.receiver] == [1]


@pytest.mark.usefixtures("long_grace")
async def test_a_server_that_closes_says_so_to_who_is_cut_off_just_now() -> None:
    async with far(tcp=True) as one:
        await small_talk(one)
        await cut(one)
        closing = asyncio.create_task(one.owner.server.close())
        await wait_all_blocked()
        one.net.refuse = False
        await closing
        await one.connection.wait_closed()
        with pytest.raises(ConnectionLost, match="owner closed it: the server was closed"):
            one.connection.notify("anything", None)


async def test_who_does_not_come_back_to_a_closed_connection_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.GRACE_SECONDS", 0.1)
    async with far(tcp=True) as one:
        await cut(one)
        one.connection.notify("anything", None)
        one.connection.close()
        await one.connection.wait_closed()
        with pytest.raises(ConnectionLost, match=r"not resumed within 0\.1 s"):
            one.connection.notify("anything", None)
    assert "what was said last to owner may be lost" in caplog.text


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("known_first", [False, True])
async def test_a_peer_whose_process_is_known_to_have_ended_is_not_waited_for(
    known_first: bool,
) -> None:
    async with far(tcp=True, patience=1000.0) as one:
        await until(lambda: one.owner.server.connections)
        [server_side] = one.owner.server.connections
        one.net.refuse = True
        if known_first:
            server_side.peer_ended()
        one.net.cut_all()
        await until(lambda: one.connection.reconnecting)
        if not known_first:
            await until(lambda: server_side.reconnecting)
            server_side.peer_ended()
        _, reason = await one.owner.lost.get()
        assert reason == "the other process closed it or died; its process has ended"
        one.connection.abort("a test")


async def test_a_peer_that_has_ended_is_lost_though_the_network_does_not_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.GRACE_SECONDS", 0.1)
    async with far(tcp=True) as one:
        await until(lambda: one.owner.server.connections)
        [server_side] = one.owner.server.connections
        server_side.peer_ended()
        assert await one.owner.lost.get() == ("worker", "its process has ended")


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
async def test_a_patience_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="patience is a number of seconds, 0 or more"):
        await connect("/nowhere", SECRET, name="w", router=Router(), patience=seconds)


async def test_a_network_that_is_bad_for_a_while_is_tried_again_and_again() -> None:
    async with wired() as owner, cutter(str(owner.path), owner.path.parent) as net:
        connection = await connect(net.address, SECRET, name="worker", router=Router())
        net.refuse = True
        net.cut_all()
        await until(lambda: net.sockets >= 4)
        net.refuse = False
        await until(lambda: not connection.reconnecting)
        await small_talk(Far(owner, net, connection))
        connection.close()
        await connection.wait_closed()
