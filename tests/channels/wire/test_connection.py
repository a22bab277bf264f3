"""Requests, notices, cancellation, lanes and heartbeats between two ends of a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from tempfile import TemporaryDirectory

import msgspec
import pytest

from rlinf_async.channels import (
    ChannelError,
    ConnectionLost,
    ItemTooLarge,
    LeaseLost,
    MalformedFrame,
)
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import Connection, Router, connect, serve
from rlinf_async.channels.wire.frames import CHUNK_BYTES, FrameType, pack_small
from rlinf_async.channels.wire.pool import Pool
from rlinf_async.channels.wire.protocol import Nothing
from rlinf_async.channels.wire.session.connection import Request
from rlinf_async.channels.wire.session.requests import RemoteError
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import PATIENCE, SECRET, until


class Text(msgspec.Struct):
    """What the tests ask and answer."""

    text: str


class Given:
    """An answer, and what becomes of it."""

    def __init__(self, peers: Peers, text: str) -> None:
        self.peers = peers
        self.text = text

    def returned(self) -> None:
        self.peers.seen.append(f"{self.text} returned")

    def losing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lost(self, reason: str) -> None:
        self.peers.seen.append(f"{self.text} lost: {reason}")


class Peers:
    """A client, a server, and what the server saw."""

    def __init__(self) -> None:
        self.router = Router()
        self.seen: list[str] = []
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.lost: list[str] = []
        self.server_side: Connection
        self.client: Connection
        self.router.add("echo", Text, self._echo)
        self.router.add("large", Text, self._large)
        self.router.add("wait", Text, self._wait)
        self.router.add("raise", Text, self._raise)
        self.router.add_sync("note", Text, self._note)
        self.router.add_sync("give", Text, self._give)

    async def _echo(
        self, connection: Connection, meta: Text, body: Encoded | None
    ) -> tuple[Text, Encoded | None]:
        return meta, body

    async def _large(
        self, connection: Connection, meta: Text, body: Encoded | None
    ) -> tuple[Text, Encoded]:
        return meta, Encoded(bytes(20_000))

    async def _wait(
        self, connection: Connection, meta: Text, body: Encoded | None
    ) -> tuple[Text, None]:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return meta, None

    async def _raise(
        self, connection: Connection, meta: Text, body: Encoded | None
    ) -> tuple[Text, None]:
        errors: dict[str, Exception] = {
            "known": LeaseLost("gone"),
            "foreign": KeyError("who"),
            "value": ValueError("bad weight"),
            "connection": RemoteError("far.RemotePayload", "there", "Traceback over there"),
        }
        raise errors[meta.text]

    def _note(self, request: Request[Text]) -> None:
        self.seen.append(request.meta.text)
        request.reply(Nothing())

    def _give(self, request: Request[Text]) -> None:
        """Answer at once, and record when the answer was not taken."""
        request.reply(request.meta, unsettled=Given(self, request.meta.text), receipt=True)


@asynccontextmanager
async def peers(heartbeat_limit: float = 15.0) -> AsyncIterator[Peers]:
    """Two processes' worth of connection in one loop."""
    made = Peers()
    arrived = asyncio.get_running_loop().create_future()
    with TemporaryDirectory(prefix="wire-") as folder:
        async with await serve(
            f"{folder}/s",
            SECRET,
            router=made.router,
            on_connect=arrived.set_result,
            on_disconnect=lambda _, reason: made.lost.append(reason),
            heartbeat_limit=heartbeat_limit,
        ) as server:
            made.client = await connect(
                server.path, SECRET, name="client", router=Router(), heartbeat_limit=heartbeat_limit
            )
            made.server_side = await arrived
            yield made
            made.client.close()
            await made.client.wait_closed()
            await made.server_side.wait_closed()


async def echo(client: Connection, text: str, body: Encoded | None = None) -> str:
    found, _ = await client.request("echo", Text(text), body, reply=Text)
    return found.text


async def large(client: Connection) -> int:
    _, body = await client.request("large", Text("x"), reply=Text)
    assert body is not None
    return len(body.data)


async def test_a_request_is_answered() -> None:
    async with peers() as two:
        answer, body = await two.client.request(
            "echo", Text("hello"), Encoded(b"data", [bytearray(b"array")]), reply=Text
        )
        assert answer == Text("hello")
        assert body is not None
        assert (body.data, [*map(bytes, body.buffers)]) == (b"data", [b"array"])
        assert two.server_side.peer == "client"


async def test_the_server_asks_the_client_too() -> None:
    async with peers() as two:
        with pytest.raises(ChannelError, match="no handler for requests of kind 'echo' here"):
            await echo(two.server_side, "hello")


async def test_answers_find_their_questions() -> None:
    async with peers() as two:
        texts = [f"text {number}" for number in range(300)]
        assert await asyncio.gather(*(echo(two.client, text) for text in texts)) == texts


async def test_notices_arrive_in_order() -> None:
    async with peers() as two:
        for number in range(100):
            two.client.notify("note", Text(str(number)))
        await echo(two.client, "after")
        assert two.seen == [str(number) for number in range(100)]


async def test_a_channel_error_comes_back_as_itself() -> None:
    async with peers() as two:
        with pytest.raises(LeaseLost, match=r"^gone$"):
            await two.client.request("raise", Text("known"), reply=Text)
        with pytest.raises(ValueError, match="bad weight"):
            await two.client.request("raise", Text("value"), reply=Text)


async def test_another_error_comes_back_with_its_name_and_traceback() -> None:
    async with peers() as two:
        with pytest.raises(RemoteError, match="KeyError: 'who'") as caught:
            await two.client.request("raise", Text("foreign"), reply=Text)
        assert caught.value.type_name == "KeyError"
        assert "in _raise" in caught.value.traceback_text
        with pytest.raises(RemoteError, match=r"far\.RemotePayload: there") as caught:
            await two.client.request("raise", Text("connection"), reply=Text)
        assert caught.value.traceback_text == "Traceback over there"


async def test_a_notice_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with peers() as two:
        with caplog.at_level(logging.WARNING):
            two.client.notify("raise", Text("known"))
            await echo(two.client, "after")
            await wait_all_blocked()
        assert "notice 'raise' of client failed: LeaseLost: gone" in caplog.text


async def test_cancelling_a_request_cancels_its_handler() -> None:
    async with peers() as two:
        asking = asyncio.create_task(two.client.request("wait", Text("x"), reply=Text))
        await two.waiting.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await two.cancelled.wait()
        assert await echo(two.client, "still there") == "still there"


async def test_a_request_cancelled_before_it_was_sent_never_arrives() -> None:
    async with peers() as two:
        two.client.pause_writing()
        asking = asyncio.create_task(two.client.request("note", Text("x"), reply=Nothing))
        await wait_all_blocked()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        two.client.resume_writing()
        await echo(two.client, "after")
        assert two.seen == []


async def test_a_large_request_cancelled_half_sent_leaves_the_connection_sound() -> None:
    async with peers() as two:
        body = Encoded(bytes(64 * CHUNK_BYTES))
        asking = asyncio.create_task(two.client.request("note", Text("x"), body, reply=Nothing))
        await until(lambda: two.client.sent_bytes >= 2 * CHUNK_BYTES)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert two.client.sent_bytes < 64 * CHUNK_BYTES
        assert await echo(two.client, "after", Encoded(bytes(2 * CHUNK_BYTES))) == "after"
        assert two.seen == []


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancelled_request_is_answered_and_taken_or_undone(turns: int) -> None:
    """However far the answer has come when the asker is cancelled."""
    async with peers() as two:
        asking = asyncio.create_task(two.client.request("give", Text("it"), reply=Text))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        [outcome] = await asyncio.gather(asking, return_exceptions=True)
        await echo(two.client, "after")
        assert len(two.seen) <= 1
        if not isinstance(outcome, asyncio.CancelledError):
            assert two.seen == []
        else:
            assert two.seen in ([], ["it returned"])  # [] if it never arrived


async def test_an_answer_that_was_taken_is_not_undone_when_the_connection_is_lost() -> None:
    async with peers() as two:
        assert (await two.client.request("give", Text("it"), reply=Text))[0] == Text("it")
        two.client.close()
        await two.server_side.wait_closed()
        assert two.seen == []


async def test_an_answer_that_was_not_taken_is_undone_when_the_connection_is_lost() -> None:
    async with peers() as two:
        asking = asyncio.create_task(two.client.request("give", Text("it"), reply=Text))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await until(lambda: two.server_side.peer_requests.unsettled)
        two.server_side.abort("a test")
        assert two.seen == ["it lost: a test"]
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_lost_connection_reaches_everybody_who_waits() -> None:
    async with peers() as two:
        asking = [
            asyncio.create_task(two.client.request("wait", Text("x"), reply=Text)) for _ in range(3)
        ]
        await two.waiting.wait()
        two.server_side.abort("a test")
        for one in asking:
            with pytest.raises(ConnectionLost, match=r"connection to 'server' was lost: .*closed"):
                await one
        await two.cancelled.wait()
        assert two.lost == ["a test"]
        with pytest.raises(ConnectionLost):
            two.client.notify("note", Text("x"))
        with pytest.raises(ConnectionLost):
            await echo(two.client, "x")


async def test_closing_sends_what_was_said_before() -> None:
    async with peers() as two:
        for number in range(1000):
            two.client.notify("note", Text(str(number)), Encoded(bytes(10_000)))
        two.client.close()
        await two.server_side.wait_closed()
        assert len(two.seen) == 1000


async def test_a_malformed_frame_closes_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with peers() as two, peers() as others:
        transport = two.client.transport
        assert transport is not None
        transport.write(b"\xff" * 100)
        await two.client.wait_closed()
        assert "a malformed frame: protocol version 255" in two.lost[0]
        assert "connection to client is closed, it sent a malformed frame" in caplog.text
        assert await echo(others.client, "fine") == "fine"


@pytest.mark.parametrize(
    "frame",
    [
        pack_small(FrameType.REPLY, 999, b"\x90"),
        pack_small(FrameType.REQUEST, 1, b"\x02\xff\xff"),
        pack_small(FrameType.RECEIPTS, 0, b"123"),
        pack_small(FrameType.CANCEL, 1, b"\x91\x05"),
        pack_small(FrameType.CANCEL, 1, b"\x92\x05\xa1\xff"),
        pack_small(FrameType.MEMORY, 0, b"\x93\x02\x01\xa1\xff"),
        pack_small(FrameType.REQUEST, 1, b"\x04wait\x81\xa4text\xa0") * 2,
    ],
    ids=["answer", "bad text", "receipts", "refusal", "bad refusal", "bad notice", "twice"],
)
async def test_a_frame_that_makes_no_sense_closes_the_connection(frame: bytes) -> None:
    async with peers() as two:
        transport = two.client.transport
        assert transport is not None
        transport.write(frame)
        await two.client.wait_closed()
        assert two.lost[0].startswith("a malformed frame: ")


async def test_a_failure_that_cannot_be_read_reaches_whoever_waits() -> None:
    async with peers() as two:
        asked = asyncio.ensure_future(two.client.request("wait", Text(""), reply=Text))
        await two.waiting.wait()
        transport = two.server_side.transport
        assert transport is not None
        transport.write(pack_small(FrameType.ERROR, 1, b"\x93\xa1\xff"))
        with pytest.raises(ConnectionLost, match="a malformed frame"):
            await asked


@pytest.mark.parametrize(
    "arguments",
    [b"\xc1", b"\x91\x05", b"\x91" * 50_000, b"\x81\xa4text\xa1\xff"],
    ids=["no", "int", "deep", "text"],
)
async def test_arguments_that_cannot_be_read_are_refused_and_the_connection_goes_on(
    arguments: bytes,
) -> None:
    async with peers() as two:
        transport = two.client.transport
        assert transport is not None
        transport.write(pack_small(FrameType.NOTICE, 0, b"\x04note" + arguments))
        with pytest.raises(MalformedFrame, match="the arguments of 'echo'"):
            await two.client.request("echo", msgspec.Raw(arguments), reply=Text)
        assert await echo(two.client, "fine") == "fine"


async def test_an_unknown_request_is_refused_and_the_connection_goes_on() -> None:
    async with peers() as two:
        with pytest.raises(ChannelError, match="no handler for requests of kind 'nothing' here"):
            await two.client.request("nothing", Text("x"), reply=Text)
        assert await echo(two.client, "fine") == "fine"


async def test_a_control_request_passes_a_64_mb_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "take", lambda *_, **__: None)  # all of it through the socket
    async with peers() as two:
        large = Encoded(b"", [bytearray(64 * 1024 * 1024)])
        order: list[str] = []

        async def ask(what: str, body: Encoded | None, control: bool) -> None:
            await two.client.request("echo", Text(what), body, reply=Text, control=control)
            order.append(what)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("large", large, False))
            await until(lambda: two.client.sent_bytes >= CHUNK_BYTES)
            group.create_task(ask("small", None, True))
            await until(lambda: order)
            assert two.client.sent_bytes < large.nbytes // 2
        assert order == ["small", "large"]


async def test_a_peer_that_asks_but_does_not_read_is_not_read_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.MAX_UNSENT_MESSAGES", 20)
    async with peers() as two:
        assert two.client.transport is not None
        two.client.transport.pause_reading()
        asking = [
            asyncio.create_task(echo(two.client, "x", Encoded(bytes(50_000)))) for _ in range(500)
        ]
        before = -1
        while two.server_side.received_bytes != before:
            before = two.server_side.received_bytes
            await wait_all_blocked()
            await asyncio.sleep(0)
        assert 0 < two.server_side.unsent < 100
        assert before < 500 * 50_000
        two.client.transport.resume_reading()
        assert await asyncio.gather(*asking) == ["x"] * 500


async def test_a_peer_that_reads_again_is_read_again_though_much_waits_for_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.MAX_UNSENT_MESSAGES", 100)
    monkeypatch.setattr(
        "rlinf_async.channels.wire.session.outbox.MAX_UNACKNOWLEDGED_BYTES", 1024**2
    )
    async with peers() as two:
        assert two.client.transport is not None
        two.client.transport.pause_reading()
        asking = [asyncio.create_task(large(two.client)) for _ in range(200)]
        await until(lambda: two.server_side.unsent > 100)
        asking += [asyncio.create_task(large(two.client)) for _ in range(200)]
        await until(lambda: two.server_side.reading_paused)
        two.client.transport.resume_reading()
        assert await asyncio.wait_for(asyncio.gather(*asking), PATIENCE) == [20_000] * 400


async def test_a_peer_that_is_not_read_is_read_again_over_the_next_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.streams.MAX_UNSENT_MESSAGES", 20)
    async with peers() as two:
        assert two.client.transport is not None
        two.server_side.pause_writing()
        asking = [asyncio.create_task(echo(two.client, "x")) for _ in range(50)]
        await until(lambda: two.server_side.reading_paused)
        two.client.transport.abort()
        assert await asyncio.wait_for(asyncio.gather(*asking), PATIENCE) == ["x"] * 50
        assert await asyncio.wait_for(echo(two.client, "y"), PATIENCE) == "y"


async def test_a_message_over_the_limit_is_refused_here_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peers() as two:
        monkeypatch.setattr("rlinf_async.channels.wire.frames.MAX_MESSAGE_BYTES", 300_000)
        before = two.client.sent_bytes
        with pytest.raises(ItemTooLarge, match="echo: 400000 bytes encoded"):
            await echo(two.client, "x", Encoded(bytes(400_000)))
        assert two.client.sent_bytes == before
        assert await echo(two.client, "fine") == "fine"


async def test_silent_peers_that_live_are_not_given_up() -> None:
    async with peers(heartbeat_limit=0.08) as two:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        loop.call_later(0.3, over.set_result, None)
        await over
        assert await echo(two.client, "alive") == "alive"


async def test_a_peer_without_heartbeats_is_given_up() -> None:
    async with peers(heartbeat_limit=0.1) as two:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        two.server_side.on_close(lambda _, reason: lost.set_result(reason))
        two.client.monitor.stop()
        assert "nothing was heard for 0." in await lost
        with pytest.raises(ConnectionLost):
            await echo(two.client, "too late")
