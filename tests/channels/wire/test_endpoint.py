"""Connecting and listening: what can be wrong with a path, a folder, a secret."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rlinf_async.channels import Channel, ConnectionLost, HandshakeFailed, WireError
from rlinf_async.channels.wire import (
    Connection,
    Router,
    Server,
    connect,
    serve,
)
from rlinf_async.channels.wire.frames import PROTOCOL_VERSION
from rlinf_async.channels.wire.session import endpoint
from rlinf_async.channels.wire.session import endpoint as dialing
from rlinf_async.channels.wire.session.endpoint import (
    LINES,
    Dialer,
    EndpointOptions,
    TcpAddress,
    UnixAddress,
    bind_tcp,
)
from rlinf_async.channels.wire.session.link import Handshake, Link, Terms
from rlinf_async.testing import wait_all_blocked
from tests.channels.wire.harness import SECRET, until, wired


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of this user's own."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that others can enter."""
    tmp_path.chmod(0o755)
    return tmp_path


async def test_the_socket_and_its_folder_are_for_the_owner_only(folder: Path) -> None:
    path = folder / "made" / "s"
    async with await serve(path, SECRET, router=Router()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_socket_is_gone_after_the_server_was_closed(folder: Path) -> None:
    async with await serve(folder / "s", SECRET, router=Router()) as server:
        assert server.path.exists()
    assert not server.path.exists()
    await server.close()


async def test_a_folder_that_others_can_use_is_refused(open_folder: Path) -> None:
    with pytest.raises(WireError, match=f"{open_folder.name}.* can be used by others"):
        await serve(open_folder / "s", SECRET, router=Router())


async def test_a_path_that_is_too_long_is_refused_by_both_sides(folder: Path) -> None:
    path = folder / ("x" * 108)
    with pytest.raises(WireError, match=r"has \d+ bytes, the system allows 107"):
        await serve(path, SECRET, router=Router())
    with pytest.raises(WireError, match=r"has \d+ bytes, the system allows 107"):
        await connect(path, SECRET, name="w", router=Router())


async def test_a_path_that_is_in_use_or_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "s").write_text("a file")
    with pytest.raises(WireError, match=r"cannot make the socket '.*/s'"):
        await serve(folder / "s", SECRET, router=Router())
    with pytest.raises(WireError, match=r"cannot make the folder '.*/s/deeper'"):
        await serve(folder / "s" / "deeper" / "s", SECRET, router=Router())


async def test_connecting_where_nobody_listens_says_so(folder: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"nobody|No such file.*is the process .* running"):
        await connect(folder / "s", SECRET, name="w", router=Router())


async def test_a_wrong_secret_fails_on_both_sides_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejected: list[WireError] = []
    async with wired(on_reject=rejected.append) as owner:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(HandshakeFailed, match="server refused: the cluster's secret is wrong"),
        ):
            await connect(owner.path, b"w" * 32, name="client", router=Router())
        good = await owner.join("friend")
        assert good.peer == "owner"
        good.close()
        await good.wait_closed()
    [error] = rejected
    assert isinstance(error, HandshakeFailed)
    assert "'client') was refused: the cluster's secret is wrong" in str(error)
    assert "was refused" in caplog.text


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 50, b"\x00" * 5000])
async def test_an_unauthenticated_client_is_refused_before_anything_is_read(noise: bytes) -> None:
    rejected: list[WireError] = []
    async with wired(on_reject=rejected.append) as owner:
        reader, writer = await asyncio.open_unix_connection(owner.path)
        writer.write(noise)
        answer = await reader.read()
        assert b"does not speak this protocol" in answer
        writer.close()
        await writer.wait_closed()
    assert isinstance(rejected[0], HandshakeFailed)


async def test_a_client_that_says_nothing_is_given_up_in_time() -> None:
    rejected: list[WireError] = []
    async with wired(on_reject=rejected.append, handshake_timeout=0.05) as owner:
        reader, writer = await asyncio.open_unix_connection(owner.path)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert "no handshake within 0.05 seconds" in str(rejected[0])


async def test_a_server_that_says_nothing_is_given_up_in_time(folder: Path) -> None:
    served: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, folder / "s"):
        with pytest.raises(HandshakeFailed, match=r"no handshake within 0\.5 seconds"):
            await connect(folder / "s", SECRET, name="w", router=Router(), handshake_timeout=0.5)
        await until(lambda: served)
        await served[0].wait_closed()


async def test_an_address_where_nothing_answers_is_given_up_in_time_and_no_handshake_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialed: list[Link] = []

    async def unanswered(dialer: Dialer, link: Link) -> None:
        dialed.append(link)
        await asyncio.Event().wait()

    monkeypatch.setattr(Dialer, "_open", unanswered)
    with pytest.raises(ConnectionLost, match=r"cannot connect to .*: no answer in time"):
        await connect("/nowhere", SECRET, name="w", router=Router(), handshake_timeout=0.05)
    assert dialed[0].opened.cancelled()  # else an error of it that nobody sees would be logged


async def test_cancelling_a_connect_leaves_nothing(folder: Path) -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    async with await asyncio.start_unix_server(silent, folder / "s"):
        connecting = asyncio.create_task(connect(folder / "s", SECRET, name="w", router=Router()))
        await wait_all_blocked()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await gone.wait()


async def test_a_server_that_is_cancelled_while_it_looks_its_name_up_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, found, made = threading.Event(), threading.Event(), list[socket.socket]()

    def bind(address: TcpAddress) -> socket.socket:
        asked.set()
        found.wait()
        made.append(bind_tcp(address))
        return made[0]

    monkeypatch.setattr(endpoint, "bind_tcp", bind)
    serving = asyncio.create_task(serve("tcp://127.0.0.1:0", SECRET, router=Router()))
    await asyncio.to_thread(asked.wait)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    found.set()
    await until(lambda: bool(made) and made[0].fileno() < 0)


async def test_closing_the_server_tells_its_clients_why() -> None:
    async with wired() as owner:
        connection = await owner.join()
    await connection.wait_closed()
    with pytest.raises(ConnectionLost, match="owner closed it: the server was closed"):
        connection.notify("anything", None)


async def test_who_proves_the_secret_just_when_the_server_is_closed_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing: list[asyncio.Task[None]] = []
    settle = Server._settle

    def close_and_settle(server: Server, made: list[Connection], handshake: Handshake) -> Terms:
        closing.append(asyncio.create_task(server.close()))
        return settle(server, made, handshake)

    monkeypatch.setattr(Server, "_settle", close_and_settle)
    async with wired() as owner:
        connection = await owner.join()
        await asyncio.gather(*closing)
    await connection.wait_closed()
    with pytest.raises(ConnectionLost, match="owner closed it: the server was closed"):
        connection.notify("anything", None)


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
async def test_a_socket_that_is_cut_as_it_connects_leaves_no_descriptor_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loop_kind: str
) -> None:
    sockets: list[socket.socket] = []
    unix_socket = dialing._unix_socket

    async def remembered(address: UnixAddress) -> socket.socket:
        sockets.append(await unix_socket(address))
        return sockets[-1]

    class CutAtFirst(Link):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if len(sockets) == 1:
                cast("asyncio.Transport", transport).abort()

    monkeypatch.setattr(dialing, "_unix_socket", remembered)
    monkeypatch.setattr(dialing, "Link", CutAtFirst)
    async with await serve(folder / "s", SECRET, router=Router()) as server:
        connection = await connect(server.path, SECRET, name="client", router=Router())
        connection.close()
        await connection.wait_closed()
    # A socket that kept the number would close what has the number by then.
    await until(lambda: [one.fileno() for one in sockets] == [-1, -1])


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(5))
async def test_a_socket_that_is_accepted_just_when_the_server_is_closed_is_closed_too(
    folder: Path, turns: int, loop_kind: str
) -> None:
    server = await serve(folder / "s", SECRET, router=Router())
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        client.connect(str(server.path))
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        gc.collect()  # a socket that was lost is warned of
        await until(lambda: _is_cut(client))


def _is_cut(client: socket.socket) -> bool:
    try:
        while client.recv(1024):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it had not been accepted
        return True
    return True


async def test_sockets_that_prove_nothing_are_bounded_and_keep_no_peer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.endpoint.MAX_PENDING", 5)
    rejected: list[WireError] = []
    async with wired(on_reject=rejected.append) as owner:
        mute = [await asyncio.open_unix_connection(owner.path) for _ in range(20)]
        friend = await owner.join("friend")
        assert len(owner.server._pending) <= 5
        assert b"evicted by" not in await mute[0][0].read()  # a refusal would be final
        assert len(rejected) >= 15
        assert all("evicted by 5 others" in str(error) for error in rejected)
        friend.close()
        await friend.wait_closed()
        for _, writer in mute:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
async def test_peers_of_two_versions_are_told_both_versions(
    monkeypatch: pytest.MonkeyPatch, tcp: bool
) -> None:
    rejected: list[WireError] = []
    async with wired(
        address="tcp://127.0.0.1:0" if tcp else None, on_reject=rejected.append
    ) as owner:
        versions = f"the client speaks 77, the server {PROTOCOL_VERSION}"
        begin = Handshake.__init__

        def of_another_release(self: Any, role: Any, secret: bytes, name: str, **more: Any) -> None:
            begin(self, role, secret, name, 77 if role == "client" else None, **more)

        monkeypatch.setattr(Handshake, "__init__", of_another_release)
        with pytest.raises(HandshakeFailed, match=versions):
            await owner.join()
        assert versions in str(rejected[0])


@pytest.mark.parametrize(
    "address",
    ["tcp://", "tcp://host", "tcp://:5000", "tcp://host:port", "tcp://host:99999", "tcp://h:1/p"],
)
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(WireError, match="is not an address: write tcp://host:port"):
        await serve(address, SECRET, router=Router())
    with pytest.raises(WireError, match="is not an address: write tcp://host:port"):
        await connect(address, SECRET, name="w", router=Router())


async def test_a_server_on_tcp_listens_at_the_one_address_that_it_was_given() -> None:
    async with wired(address="tcp://127.0.0.1:0") as owner:
        host, _, port = owner.server.address.removeprefix("tcp://").partition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        with pytest.raises(ConnectionLost, match="cannot connect to"):
            await connect(f"tcp://127.0.0.2:{port}", SECRET, name="w", router=Router())
        with pytest.raises(WireError, match="has no path: use its address"):
            _ = owner.server.path
        connection = await owner.join()
        assert connection.memory.refused == ""
        connection.close()
        await connection.wait_closed()


async def test_an_address_of_another_host_or_one_in_use_cannot_be_listened_at() -> None:
    async with wired(address="tcp://127.0.0.1:0") as owner:
        for address in (owner.server.address, "tcp://192.0.2.1:0"):
            with pytest.raises(WireError, match=f"cannot listen on {address}: .*of this host"):
                await serve(address, SECRET, router=Router())


# ---- a connect that is cancelled, and one that is cut short


class Made:
    """The links and connections that were made on the connecting side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links: list[Link] = []
        self.connections: list[Connection] = []
        begin, make = Link.connection_made, EndpointOptions.connection

        def began(link: Link, transport: asyncio.BaseTransport) -> None:
            if link.handshake.role == "client":
                self.links.append(link)
            begin(link, transport)

        def made(side: EndpointOptions, *arguments: Any, **more: Any) -> Connection:
            connection = make(side, *arguments, **more)
            if side.name == "worker":
                self.connections.append(connection)
            return connection

        monkeypatch.setattr(Link, "connection_made", began)
        monkeypatch.setattr(EndpointOptions, "connection", made)


def at_step(
    monkeypatch: pytest.MonkeyPatch, role: str, step: int, call: Callable[[Link], object]
) -> None:
    """Call this once a link of this role was told so much of its handshake."""
    greet, steps = Link._greet, list[Link]()

    def greeted(link: Link, data: bytes) -> None:
        greet(link, data)
        if link.handshake.role == role:
            steps.append(link)
            if len(steps) == step:
                call(link)

    monkeypatch.setattr(Link, "_greet", greeted)


@pytest.mark.parametrize("step", [1, 2], ids=["its proof was sent", "it is connected"])
@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
async def test_a_connect_that_is_cancelled_at_its_end_leaves_nothing_on_either_side(
    monkeypatch: pytest.MonkeyPatch, step: int, tcp: bool
) -> None:
    made = Made(monkeypatch)
    at_step(monkeypatch, "client", step, lambda link: connecting.cancel())
    async with wired(address="tcp://127.0.0.1:0" if tcp else None) as owner:
        before = asyncio.all_tasks()
        connecting = asyncio.create_task(owner.join())
        with pytest.raises(asyncio.CancelledError):
            await connecting
        [link], [connection] = made.links, made.connections
        assert connection.closed
        assert link.ended.done()
        assert link.transport is None
        assert connection.monitor._timer is not None
        assert connection.monitor._timer.cancelled()
        assert asyncio.all_tasks() == before
        assert await owner.lost.get() == ("worker", "worker closed it: whoever connected gave up")
        assert not owner.server.connections


async def test_a_connect_that_is_cancelled_twice_does_not_wait_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(monkeypatch)
    at_step(monkeypatch, "client", 2, lambda link: connecting.cancel())
    async with wired() as owner:
        connecting = asyncio.create_task(owner.join())
        await until(lambda: made.connections and made.connections[0].closed)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await made.links[0].ended
        assert (await owner.lost.get())[0] == "worker"


async def test_a_first_connect_that_is_turned_out_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_step(monkeypatch, "server", 1, lambda link: link.evict("evicted"))
    rejected: list[WireError] = []
    async with wired(on_reject=rejected.append) as owner:
        friend = await owner.join("friend")
        assert friend.peer == "owner"
        assert [str(error) for error in rejected] == ["evicted"]
        friend.close()
        await friend.wait_closed()


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
async def test_a_first_connect_whose_last_answer_is_cut_off_becomes_one_connection_not_two(
    monkeypatch: pytest.MonkeyPatch, tcp: bool
) -> None:
    greet, connected = Link._greet, list[Connection]()

    def cut_off(link: Link, data: bytes) -> None:
        if link.handshake.role == "client" and link.handshake.introduced and not connected[1:]:
            connected.append(connected[0])
            assert link.transport is not None
            link.transport.abort()
        else:
            greet(link, data)

    monkeypatch.setattr(Link, "_greet", cut_off)
    async with wired(
        address="tcp://127.0.0.1:0" if tcp else None, on_connect=connected.append
    ) as owner:
        friend = await owner.join("friend")
        assert len(connected) == 2
        assert owner.server.connections == {connected[0]}
        assert friend.number == connected[0].number
        channel = Channel(int, name="numbers", capacity=2)
        await owner.sender(channel, friend).put(7)
        assert channel.receiver.get_nowait() == 7
        friend.close()
        await friend.wait_closed()
        await owner.lost.get()
        assert not owner.server._by_attempt


@pytest.mark.parametrize("patience", [0.0, 0.2])
async def test_a_first_connect_that_is_always_cut_is_given_up_when_patience_is_over(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    made = Made(monkeypatch)
    monkeypatch.setattr(Link, "_greet", lambda link, data: link.evict("evicted"))
    async with wired() as owner:
        with pytest.raises(ConnectionLost, match="lost in the handshake") as caught:
            await owner.join(patience=patience)
        assert (len(made.links) > 1) == ("tried again for 0.2 s" in str(caught.value))
        assert patience or len(made.links) == 1
        await until(lambda: all(link.ended.done() for link in made.links))


async def test_a_wrong_secret_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    async with wired() as owner:
        with pytest.raises(HandshakeFailed, match="secret is wrong"):
            await connect(owner.path, b"w" * 32, name="client", router=Router())
        assert len(made.links) == 1


# ---- unauthenticated sockets


async def knock(port: int, address: str, say: bytes = b"") -> asyncio.StreamReader:
    """A socket from this address of this host, which sends these bytes and no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(say)
    _knocked.append(writer)
    return reader


_knocked: list[asyncio.StreamWriter] = []


async def test_a_flood_of_silent_sockets_evicts_its_own_and_no_peer_that_has_said_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.endpoint.MAX_PENDING", 5)
    rejected: list[WireError] = []
    hello = Handshake("client", SECRET, "friend").take_outgoing()
    async with wired(address="tcp://127.0.0.1:0", on_reject=rejected.append) as owner:
        port = int(owner.server.address.rpartition(":")[2])
        friend = await knock(port, "127.0.0.1", hello)
        assert await friend.read(1)
        flood = [await knock(port, "127.0.0.1") for _ in range(20)]
        await until(lambda: len(rejected) == 16)
        assert [await reader.read() for reader in flood[:16]] == [b""] * 16
        assert not friend.at_eof()
        assert len(owner.server._pending) == 5
        for writer in _knocked:
            writer.close()
            await writer.wait_closed()
        _knocked.clear()


async def test_a_peer_that_a_flood_has_evicted_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.session.endpoint.MAX_PENDING", 5)
    evicted: list[WireError] = []
    async with wired(address="tcp://127.0.0.1:0", on_reject=evicted.append) as owner:
        port = int(owner.server.address.rpartition(":")[2])
        hello = Handshake("client", SECRET, "flood").take_outgoing()
        joining = asyncio.create_task(
            connect(owner.server.address, SECRET, name="friend", router=Router())
        )
        for _ in range(20):
            await knock(port, "127.0.0.1", hello)
        friend = await joining
        assert len(evicted) >= 15
        friend.close()
        await friend.wait_closed()
        for writer in _knocked:
            writer.close()
            await writer.wait_closed()
        _knocked.clear()


async def test_those_who_do_not_know_the_secret_cannot_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejected: list[Exception] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "owner.sock"
        async with await serve(
            path, SECRET, router=Router(), name="owner", on_reject=rejected.append
        ) as server:
            for _ in range(LINES + 20):
                with pytest.raises(HandshakeFailed):
                    await connect(path, b"x" * 32, name="stranger", router=Router())
            await until(lambda: len(rejected) == LINES + 20)
            with pytest.raises(HandshakeFailed):  # the log is not what they are told
                await connect(path, b"x" * 32, name="stranger", router=Router())
            assert server.connections == set()
    lines = [one.getMessage() for one in caplog.records if "not made" in one.getMessage()]
    assert len(lines) == LINES + 1
    assert lines[-1].startswith("21 more connections to ")
