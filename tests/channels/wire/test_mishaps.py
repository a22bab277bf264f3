"""Odd errors, odd items, odd arguments and peers that stop: nothing hangs, nothing else is lost."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import (
    Channel,
    ChannelFailed,
    Latest,
    MalformedFrame,
    Receiver,
    WrongItemType,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Connection, Router, protocol
from rlinf_async.channels.wire.receiving import RemoteReceiver
from rlinf_async.channels.wire.sending import RemoteSender
from rlinf_async.channels.wire.session import link as hangup
from rlinf_async.channels.wire.session.connection import Request
from rlinf_async.channels.wire.session.link import Handshake
from rlinf_async.channels.wire.session.requests import RemoteError
from rlinf_async.testing import wait_all_blocked
from rlinf_async.workers.base import WorkerError
from tests.channels.wire.harness import (
    SECRET,
    Wired,
    anything_fits,
    remote_latest_pair,
    remote_pair,
    until,
    wired,
)


class Text(msgspec.Struct):
    """It can hold what is no UTF-8."""

    text: str


class LongText(Text):
    """Adds a field that its base class does not have."""

    more: str = ""


class Values(msgspec.Struct):
    """Large enough to travel beside the MessagePack."""

    array: NDArray[np.float32]


class Mute(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def zeros() -> Values:
    return Values(np.zeros(4096, np.float32))


ODD_ERRORS = [
    ValueError("x" * 300_000),
    ValueError("\u4e16" * 300_000),
    FileNotFoundError("caf\udce9.txt"),
    Mute(),
]
ODD = pytest.mark.parametrize("error", ODD_ERRORS, ids=["huge", "huge and wide", "escaped", "mute"])


# ---- errors


@ODD
async def test_a_lease_goes_back_whatever_its_holder_raised(error: Exception) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        await sender.put(1)
        with pytest.raises(type(error)):
            async with receiver.lease():
                raise error
        assert await receiver.get() == 1


@ODD
async def test_a_channel_can_be_failed_with_any_error(error: Exception) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, receiver):
        sender.fail(error)
        with pytest.raises(ChannelFailed, match=f"'numbers' failed: {type(error).__name__}"):
            await receiver.get()


@ODD
async def test_a_handler_is_answered_for_whatever_it_raised(error: Exception) -> None:
    async def fail(connection: Connection, meta: Text, body: Encoded | None) -> Any:
        raise error

    def fail_at_once(request: Request[Text]) -> None:
        raise error

    async with wired() as owner:
        router = Router()
        router.add("fail", Text, fail)
        router.add_sync("fail at once", Text, fail_at_once)
        await owner.join_with(router)
        [connection] = owner.server.connections
        for kind in ("fail", "fail at once"):
            with pytest.raises((RemoteError, ValueError)) as caught:
                await connection.request(kind, Text(""), reply=Text)
            assert len(str(caught.value).encode()) < 20_000


@ODD
def test_a_failed_call_fits_in_its_answer_whatever_was_raised(error: Exception) -> None:
    failed = WorkerError.of(error, worker="W[0]", host="h", pid=1, method="run")
    assert failed.failure.error_type == type(error).__name__
    assert len(msgspec.msgpack.encode(failed.failure)) < 100_000


# ---- items


async def test_a_waiting_get_is_told_of_an_item_that_cannot_be_encoded() -> None:
    channel = Channel(Text, name="texts")
    async with remote_pair(channel) as (_, receiver):
        waiting = asyncio.ensure_future(receiver.get())
        await until(lambda: channel.waits())
        channel.queue.fits = anything_fits
        await channel.sender.put(Text("a\udcff"))
        with pytest.raises(WrongItemType, match=r"'texts': Text\.text: .*surrogates"):
            await waiting
        assert channel.dead_letters[0].item == Text("a\udcff")


async def test_a_get_whose_delivery_breaks_is_told_and_the_items_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        waiting = asyncio.ensure_future(receiver.get())
        await until(lambda: channel.waits())

        def broken(request: Request[Any], *_: Any, **__: Any) -> None:
            raise LookupError("broken")

        with monkeypatch.context() as patched:
            patched.setattr(Request, "reply", broken)
            await channel.sender.put(1)
            with pytest.raises(RemoteError, match="LookupError: broken"):
                await waiting
        assert await receiver.get() == 1
        assert statistics_of(channel.queue).gets == 1


async def test_a_message_of_a_subclass_is_refused_before_it_loses_fields() -> None:
    async with remote_pair(Channel(Text, name="texts")) as (sender, _):
        with pytest.raises(WrongItemType, match=r"'texts'.*LongText would arrive as Text"):
            await sender.put(LongText("a", "lost"))


async def test_what_a_failed_holder_did_to_an_array_is_not_delivered_again() -> None:
    async def change_and_fail(end: Receiver[Values]) -> None:
        async with end.lease() as taken:
            assert taken[0].array.sum() == 0
            taken[0].array += 1
            raise ValueError("a failure")

    channel = Channel(Values, name="values")
    async with remote_pair(channel) as (sender, receiver):
        await sender.put(zeros())
        for end in (channel.receiver, receiver, channel.receiver):
            with pytest.raises(ValueError, match="a failure"):
                await change_and_fail(end)
        assert (await receiver.get()).array.sum() == 0


async def test_receivers_of_a_latest_do_not_share_arrays() -> None:
    latest = Latest(Values, name="weights")
    async with remote_latest_pair(latest) as (sender, remote):
        await sender.publish(zeros())
        for receiver in (latest.receiver, remote, remote.clone(), latest.receiver):
            value = await receiver.get(newer_than=0)
            assert value.array.sum() == 0
            value.array += 1


async def test_a_latest_value_that_cannot_be_read_is_reported_with_its_channel() -> None:
    latest = Latest(Text, name="weights")
    async with remote_latest_pair(latest) as (sender, receiver):
        liar: Any = sender
        liar._wire.fits = anything_fits
        await liar.publish(5)
        with pytest.raises(MalformedFrame, match=r"channel 'weights' of owner: .* not a Text"):
            await receiver.get()


# ---- arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": 2.0}, "'numbers': a weight is an int"),
        ({"key": ("a", 1)}, "'numbers': a key is a str or an int"),
        ({"weight": "3"}, "'numbers': a weight is an int"),
        ({"weight": True}, "'numbers': a weight is an int"),
        ({"weight": 1.0}, "'numbers': a weight is an int"),
    ],
    ids=str,
)
@pytest.mark.parametrize("remote", [True, False])
async def test_a_bad_key_or_weight_is_refused_and_the_channel_goes_on(
    options: dict[str, Any], said: str, remote: bool
) -> None:
    channel = Channel(int, name="numbers")
    local = nullcontext((channel.sender, channel.receiver))
    async with remote_pair(channel) if remote else local as (sender, receiver):
        with pytest.raises(TypeError, match=said):
            await sender.put(1, **options)
        await sender.put(2)
        with pytest.raises(TypeError, match="'numbers'"):
            await receiver.get_batch(**{"weight": 1, **options})
        assert await receiver.get() == 2


async def test_the_owner_refuses_arguments_that_it_cannot_read() -> None:
    async with remote_pair(Channel(int, name="numbers")) as (sender, receiver):
        assert isinstance(sender, RemoteSender)
        put: Any = protocol.Put(sender._number, None, "heavy", "w")  # type: ignore[arg-type]
        with pytest.raises(MalformedFrame, match=r"arguments of 'channel\.put'.*\$\[2\]"):
            await sender._wire.connection.request(
                "channel.put", put, Encoded(b"\x01"), reply=protocol.Nothing
            )
        await sender.put(2)
        assert await receiver.get() == 2


async def test_a_clone_cannot_take_the_number_of_another(caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (sender, _):
        assert isinstance(sender, RemoteSender)
        for number in (-7, -7, 3):
            clone = protocol.Clone(sender._number, number, "w")
            sender._wire.connection.notify("channel.clone", clone)
        await sender.put(1)
        assert statistics_of(channel.queue).senders == 2
        assert caplog.text.count("it is not free") == 2


@pytest.mark.parametrize("lease", [False, True])
async def test_what_is_taken_by_a_notice_goes_back_and_nothing_waits(lease: bool) -> None:
    channel = Channel(int, name="numbers")
    async with remote_pair(channel) as (_, receiver):
        assert isinstance(receiver, RemoteReceiver)
        get = protocol.Get(receiver._number, None, 1, None, "w", lease)
        for item in (1, 2):
            receiver._wire.connection.notify("channel.get", get)
            await receiver.statistics()  # asked later, so that was heard
            assert statistics_of(channel.queue).waiting_getters == 0
            await channel.sender.put(item)
            receiver._wire.connection.notify("channel.get", get)
            await receiver.statistics()
            assert statistics_of(channel.queue).leases_out == 0
        assert [await receiver.get(), await receiver.get()] == [1, 2]


# ---- ends of connections


async def stopped_peer(owner: Wired) -> socket.socket:
    """A process that has joined, and was stopped since: it neither reads nor leaves."""
    loop = asyncio.get_running_loop()
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    await loop.sock_connect(peer, str(owner.path))
    handshake = Handshake("client", SECRET, "stopped")
    await loop.sock_sendall(peer, handshake.take_outgoing())
    while not handshake.done:
        handshake.feed(await loop.sock_recv(peer, 4096))
        await loop.sock_sendall(peer, handshake.take_outgoing())
    await until(lambda: owner.server.connections)
    return peer


async def test_closing_does_not_wait_for_a_peer_that_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hangup, "GRACE_SECONDS", 0.01)
    async with wired() as owner:
        peer = await stopped_peer(owner)
        with peer:
            [connection] = owner.server.connections
            connection.notify("large", None, Encoded(bytes(4_000_000)))
            await wait_all_blocked()
            await owner.server.close()
            assert connection.closed


class Ends(asyncio.Protocol):
    """Notes that its socket was closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def test_closing_a_socket_that_its_peer_has_just_reset_is_no_error() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    transport, protocol = await loop.create_connection(Ends, sock=ours)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # resets it, which the loop has not seen
    hanging = hangup.HangUp()
    hanging.start(transport, "a peer", first=True)
    await protocol.closed.wait()
    assert transport.is_closing()
    hanging.stop()


async def test_a_callback_that_raises_keeps_no_lease_from_going_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def bad(connection: Connection, reason: str) -> None:
        raise LookupError("a callback")

    channel, seen = Channel(int, name="numbers"), list[str]()
    async with wired() as owner:
        connection = await owner.join()
        [server_side] = owner.server.connections
        server_side.on_close(bad)
        receiver = owner.receiver(channel, connection)
        server_side.on_close(lambda _, reason: seen.append(reason))
        await channel.sender.put(1)
        await receiver._take(1, None, None)
        connection.abort("a test")
        await until(lambda: seen)
        assert statistics_of(channel.queue).leases_out == 0
        assert statistics_of(channel.queue).depth == 1
    assert "LookupError: a callback" in caplog.text


async def test_an_answer_that_fails_to_be_undone_keeps_no_other_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[object] = []

    class Given:
        """An answer that nobody has settled."""

        def __init__(self, number: int) -> None:
            self.number = number

        def returned(self) -> None:
            self.lost("it was returned")

        def losing(self) -> AbstractContextManager[None]:
            return nullcontext()

        def lost(self, reason: str) -> None:
            seen.append(self.number)
            raise LookupError(f"{self.number}: {reason}")

    def give(request: Request[protocol.End]) -> None:
        given = Given(request.meta.end)
        request.reply(protocol.Nothing(), unsettled=given, receipt=True)

    async with wired() as owner:
        router = Router()
        router.add_sync("give", protocol.End, give)
        joined = await owner.join_with(router)
        [server_side] = owner.server.connections
        asked = [
            asyncio.ensure_future(
                server_side.ask("give", protocol.End(number), reply=protocol.Nothing)
            )
            for number in (1, 2)
        ]
        for answer in asked:
            await answer
        joined.abort("a test")
        assert seen == [1, 2]
        assert caplog.text.count("cleaning up after") == 2


async def test_a_withdrawn_channel_closes_the_ends_of_other_processes() -> None:
    channel, latest = Channel(int, name="numbers"), Latest(int, name="newest")
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        clone = sender.clone()
        await clone.put(1)
        reader = owner.latest_receiver(latest, connection)
        await latest.sender.publish(1)
        assert await reader.get() == 1
        withdrawals: list[Callable[[], None]] = [
            partial(owner.channels.withdraw, channel),
            partial(owner.channels.withdraw, latest),
        ]
        for withdraw in withdrawals * 2:
            withdraw()
        assert statistics_of(channel.queue).senders == 0
        assert not owner.channels._newest
        assert not owner.channels._published
        clone.close()
        connection.close()


async def test_a_peer_cannot_fill_memory_with_puts_that_wait_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.connection.MAX_HELD_BYTES", 100_000)
    channel = Channel(bytes, name="texts", capacity=1)
    async with wired() as owner:
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        putting = [asyncio.ensure_future(sender.put(bytes(30_000))) for _ in range(10)]
        refused = [one for one in putting if await is_refused(one)]
        assert 5 <= len(refused) <= 7
        seen = statistics_of(channel.queue)
        assert seen.waiting_putters + seen.depth + len(refused) == 10
        for _ in range(10 - len(refused)):
            assert len(await channel.receiver.get()) == 30_000
        assert not [one for one in putting if one not in refused and await is_refused(one)]
        await sender.put(bytes(300_000))
        waiting = asyncio.ensure_future(sender.put(bytes(300_000)))  # one alone is always let in
        assert len(await channel.receiver.get()) == 300_000
        await waiting
        connection.close()
        await connection.wait_closed()


async def is_refused(putting: asyncio.Future[None]) -> bool:
    """Whether this put has failed, once nothing is under way."""
    for _ in range(4):
        await wait_all_blocked()
        await asyncio.sleep(0)
    if not putting.done() or putting.exception() is None:
        return False
    assert re.search(r"bytes of its requests wait here already, 100000", str(putting.exception()))
    return True
