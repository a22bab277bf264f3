"""Where a cluster can be reached, by whom, and what it reports of a connection that is cut."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.channels import ConnectionLost, HandshakeFailed
from rlinf_async.channels.wire import Router, connect
from rlinf_async.channels.wire.session.tls import FILE_VARIABLE, VARIABLE
from rlinf_async.runtime.process import ProcessBackend
from rlinf_async.workers import BuildError
from tests.channels.wire.harness import until
from tests.runtime.kit import NewCluster, Number, Teller, Waiter

SECRET = "known to every host of the cluster"


@pytest.fixture
def setting() -> tuple[str, str]:
    """Only where there are processes."""
    return "process", "uvloop"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """In a file of this user's own."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    return SECRET.encode()


def listening() -> set[str]:
    """The TCP sockets of this process that listen."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, by whomever
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


async def test_a_cluster_listens_for_no_other_host_unless_it_is_asked_to(
    new_cluster: NewCluster,
) -> None:
    before = listening()
    async with new_cluster() as cluster:
        await cluster.launch(Waiter)
        assert cluster.address is None
        assert listening() == before


async def test_other_hosts_are_let_in_at_one_address_if_they_know_the_secret(
    secret: bytes, new_cluster: NewCluster
) -> None:
    async with new_cluster(listen="tcp://127.0.0.1:0") as cluster:
        assert cluster.address is not None
        assert cluster.address.startswith("tcp://127.0.0.1:")
        with pytest.raises(HandshakeFailed, match="secret is wrong"):
            await connect(cluster.address, b"a guess of some length", name="x", router=Router())
        stranger = await connect(cluster.address, secret, name="Nobody[0]#1", router=Router())
        await stranger.wait_closed()
        with pytest.raises(ConnectionLost, match=r"not an expected worker: 'Nobody\[0\]#1'"):
            stranger.notify("anything", None)
        tellers = await cluster.launch(Teller)  # its workers still come through the Unix socket
        assert await tellers.call(Teller.life) == [0]
    with pytest.raises(ConnectionLost, match="cannot connect"):
        await connect(cluster.address or "tcp://127.0.0.1:1", secret, name="x", router=Router())


def test_the_environment_may_say_where_to_listen(
    monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    monkeypatch.setenv("RLINF_ASYNC_LISTEN", "tcp://127.0.0.1:0")
    listeners = ProcessBackend(heartbeat_limit=60).listeners
    assert listeners.listen == "tcp://127.0.0.1:0"
    assert listeners.secret == secret


def test_listening_without_a_secret_is_refused_when_the_cluster_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=f"needs a secret: make one .* in {FILE_VARIABLE}"):
        ra.Cluster.process(listen="tcp://127.0.0.1:0")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(BuildError, match=r"secret cannot be used: .*No such file"):
        ra.Cluster.process(listen="tcp://127.0.0.1:0")
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(BuildError, match=r"secret cannot be used: .*5 bytes"):
        ra.Cluster.process(listen="tcp://127.0.0.1:0")


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://nowhere"])
async def test_an_address_where_it_cannot_listen_is_named_and_nothing_is_left(
    secret: bytes, new_cluster: NewCluster, address: str
) -> None:
    with pytest.raises(BuildError, match=f"listen='{address}': "):
        async with new_cluster(listen=address):
            raise AssertionError("it was entered")


async def test_a_report_says_who_is_cut_off_and_what_waits_for_it(
    new_cluster: NewCluster,
) -> None:
    async with new_cluster(deadlock_after=None) as cluster:
        numbers = cluster.channel(Number, name="numbers")
        waiters = await cluster.launch(Waiter)
        waiters.call(Waiter.for_item, numbers.receiver)
        await until(cluster.waits)
        assert "cut off" not in cluster.report()
        backend = cluster._backend
        assert isinstance(backend, ProcessBackend)
        connection = backend.workers["Waiter[0]"].connection
        assert connection is not None
        link = connection.link
        assert link is not None
        link.drop()
        connection.cut(link, "a test")
        report = cluster.report()
        assert re.search(r"Waiter\[0\] is cut off: reconnecting for \d+\.\d s", report)
        assert "Waiter[0].for_item: cut off, reconnecting" in report
        await until(lambda: not connection.reconnecting)
        assert "cut off" not in cluster.report()
        await numbers.sender.put(Number(1))
        numbers.sender.close()
