"""TLS between hosts: the certificate follows from the secret, and nothing goes in the clear."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from rlinf_async.channels import Channel, HandshakeFailed, WireError
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire import ChannelClient, ChannelServer, Direct, Router, connect, serve
from rlinf_async.channels.wire.sending import RemoteSender
from rlinf_async.channels.wire.session.tls import client_context, make_certificate
from tests.channels.wire.harness import SECRET, until

OTHER = b"another secret of thirty-two bytes"
HERE = "tls://127.0.0.1:0"


@asynccontextmanager
async def listening_on(address: str) -> AsyncIterator[tuple[int, bytearray]]:
    """A port that leads to the server at this address, and all bytes that pass there."""
    where, seen = urlsplit(address), bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(where.hostname, where.port)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], seen
    server.close()


async def test_items_go_encrypted_and_a_plain_connection_shows_them() -> None:
    text = "a prompt that nobody else may read " * 8
    for scheme, visible in (("tls", False), ("tcp", True)):
        router = Router()
        owner = ChannelServer(router)
        prompts = Channel[str](str, name="prompts")
        async with (
            await serve(f"{scheme}://127.0.0.1:0", SECRET, router=router) as server,
            listening_on(server.address) as (port, seen),
        ):
            address = f"{scheme}://127.0.0.1:{port}"
            connection = await connect(address, SECRET, name="worker", router=Router())
            assert connection.encrypted is not visible
            end = ChannelClient(connection).end(owner.end_ref(prompts.sender, "worker"), str)
            assert isinstance(end, RemoteSender)
            await end.put(text)
            assert await prompts.receiver.get() == text
            assert (text.encode() in seen) is visible
            connection.close()
            await connection.wait_closed()


def test_the_certificate_is_the_same_in_every_process_with_the_secret() -> None:
    assert make_certificate(SECRET) == make_certificate(bytes(SECRET))
    assert make_certificate(SECRET)[1] != make_certificate(OTHER)[1]


@asynccontextmanager
async def failing_handshakes() -> AsyncIterator[None]:
    """In debug mode asyncio reports each as an error of the loop, from a task of its own."""
    before = asyncio.all_tasks()
    asyncio.get_running_loop().set_debug(False)
    yield
    await until(lambda: asyncio.all_tasks() == before)


async def test_another_secret_does_not_get_past_tls() -> None:
    async with failing_handshakes(), await serve(HERE, SECRET, router=Router()) as server:
        with pytest.raises(HandshakeFailed, match=r"CERTIFICATE_VERIFY_FAILED.*the same secret"):
            await connect(server.address, OTHER, name="worker", router=Router())


async def test_a_client_without_the_certificate_is_refused_before_our_handshake() -> None:
    patient = serve(HERE, SECRET, router=Router(), handshake_timeout=300)
    async with failing_handshakes(), await patient as server:
        where = urlsplit(server.address)
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.load_verify_locations(cadata=make_certificate(SECRET)[1].decode())
        reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=trusting)
        with contextlib.suppress(ssl.SSLError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(("there", "here"), [("tls", "tcp"), ("tcp", "tls")])
async def test_one_side_with_tls_and_one_without_is_an_error(there: str, here: str) -> None:
    listening = serve(f"{there}://127.0.0.1:0", SECRET, router=Router())
    async with failing_handshakes(), await listening as server:
        address = server.address.replace(there, here)
        with pytest.raises(WireError, match="TLS"):
            await connect(
                address, SECRET, name="worker", router=Router(), handshake_timeout=5, patience=0
            )


async def test_a_peer_that_never_begins_tls_is_forgotten() -> None:
    hasty = serve(HERE, SECRET, router=Router(), handshake_timeout=0.05)
    async with failing_handshakes(), await hasty as server:
        where = urlsplit(server.address)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        assert await reader.read() == b""
        writer.close()
        assert not server.connections


async def test_large_arrays_past_the_owner_are_encrypted_where_the_owner_is_reached_so() -> None:
    async with await serve(HERE, SECRET, router=Router()) as server:
        connection = await connect(server.address, SECRET, name="worker", router=Router())
        direct = await Direct.of_worker(connection, SECRET, name="worker", use="auto")
        assert direct is not None
        assert [urlsplit(one).scheme for one in direct.addresses] == ["", "tls"]
        fetches = await Direct.of_worker(connection, SECRET, name="restartable", retain=False)
        assert fetches is not None
        assert not fetches.addresses  # what a worker put that is restarted is not lost with it
        await fetches.close()
        connection.close()
        await connection.wait_closed()
        await direct.close()


async def test_without_cryptography_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    client_context.cache_clear()
    with pytest.raises(WireError, match=r"pip install 'rlinf_async\[tls\]'"):
        await serve(HERE, b"a secret that has no certificate yet", router=Router())


def bytes_of(body: Encoded | None) -> int:
    return 0 if body is None else body.nbytes


@pytest.mark.parametrize("here", ["tls", "tcp"])
async def test_what_was_said_before_a_connection_was_closed_arrives(here: str) -> None:
    """Also where its socket takes none of it for the moment."""
    router, got, ended = Router(), list[int](), asyncio.Queue[str]()
    router.add_sync("large", None, lambda request: got.append(bytes_of(request.body)))
    async with await serve(
        f"{here}://127.0.0.1:0",
        SECRET,
        router=router,
        on_disconnect=lambda connection, reason: ended.put_nowait(reason),
    ) as server:
        connection = await connect(server.address, SECRET, name="worker", router=Router())
        for _ in range(6):
            connection.notify("large", None, Encoded(b"", [bytearray(4_000_000)]))
        connection.close()
        assert await ended.get() == "worker closed it: it was closed"
        assert got == [4_000_000] * 6
        await connection.wait_closed()


async def test_sockets_that_do_not_begin_tls_are_bounded_and_keep_no_peer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.endpoint.MAX_PENDING", 5)
    rejected: list[WireError] = []
    async with (
        failing_handshakes(),
        await serve(HERE, SECRET, router=Router(), on_reject=rejected.append) as server,
    ):
        where = urlsplit(server.address)
        mute = [await asyncio.open_connection(where.hostname, where.port) for _ in range(20)]
        friend = await connect(server.address, SECRET, name="friend", router=Router())
        assert len(server._pending) <= 5
        assert len(rejected) >= 15
        assert all("evicted by 5 others" in str(error) for error in rejected)
        with contextlib.suppress(ConnectionResetError):
            assert await mute[0][0].read() == b""
        friend.close()
        await friend.wait_closed()
        for _, writer in mute:
            writer.close()
