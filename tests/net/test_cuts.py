"""A cut network loses nothing and doubles nothing, wherever it is cut."""

from __future__ import annotations

import pytest

from rlinf_async.channels import ConnectionLost
from rlinf_async.channels.wire import Connection, Router, connect
from rlinf_async.channels.wire.session import outbox as kept
from rlinf_async.channels.wire.session import streams
from tests.channels.wire.harness import SECRET, until, wired
from tests.net.cutter import Cut, Way, cutter
from tests.net.kit import arrays_both_ways, far, said, small_talk

WAYS: list[Way] = ["to server", "to client"]
ways = pytest.mark.parametrize("way", WAYS)


@ways
async def test_a_cut_after_any_byte_loses_and_doubles_nothing(way: Way, loop_kind: str) -> None:
    """Within headers, within payloads, between frames: each byte is the last that arrives once."""
    hello, total = await said(tcp=True)
    step = 1 if loop_kind == "uvloop" else 13  # asyncio's debug mode takes its time
    tries = cut = 0
    for after in range(hello[way] + 1, total[way], step):
        async with far(Cut(way, after), tcp=True) as one:
            await small_talk(one)
            await until(lambda: one.net.sockets == 1 + one.connection.reconnection.cuts)
            tries += 1
            cut += one.connection.reconnection.cuts
    assert tries > 20
    assert cut >= 0.9 * tries  # the very last bytes may not be needed


@ways
async def test_a_cut_while_it_is_taken_up_again_loses_and_doubles_nothing(way: Way) -> None:
    """In the second handshake, and while what was lost is sent again."""
    hello, total = await said(tcp=True)
    middle = (hello["to client"] + total["to client"]) // 2
    for after in range(0, hello[way] + 400, 11):
        async with far(Cut("to client", middle), Cut(way, after), tcp=True) as one:
            await small_talk(one)
            assert one.net.sockets >= 2


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
async def test_arrays_survive_many_cuts(tcp: bool, reset: bool) -> None:
    steps = [9_000, 700, 90_000, 1_200, 260_000, 30, 400_000, 150_000, 2_000, 5_000]
    cuts = [Cut(WAYS[index % 2], after, reset) for index, after in enumerate(steps)]
    async with far(*cuts, tcp=tcp) as one:
        await arrays_both_ways(one, 60)
        assert one.net.sockets >= 4
        assert one.connection.reconnection.cuts >= 3


@ways
async def test_a_cut_in_the_first_handshake_is_an_error_and_leaves_nothing(way: Way) -> None:
    hello, _ = await said(tcp=True)
    async with wired(address="tcp://127.0.0.1:0", patience=0.01) as owner:
        for after in range(0, hello[way], 5):
            async with cutter(owner.server.address, None, Cut(way, after)) as net:
                with pytest.raises(ConnectionLost, match=r"lost in the handshake|cannot connect"):
                    await connect(net.address, SECRET, name="worker", router=Router(), patience=0)
        await until(lambda: not owner.server._pending)


@ways
async def test_a_cut_in_the_first_handshake_costs_a_second_socket_and_makes_one_connection(
    way: Way,
) -> None:
    hello, _ = await said(tcp=True)
    made: list[Connection] = []
    async with wired(address="tcp://127.0.0.1:0", on_connect=made.append) as owner:
        for after in range(0, hello[way], 5):
            async with cutter(owner.server.address, None, Cut(way, after)) as net:
                connection = await connect(net.address, SECRET, name="worker", router=Router())
                assert net.sockets >= 2
                await until(lambda: made)
                assert [one.number for one in made] == [connection.number]
                connection.close()
                await connection.wait_closed()
                await until(lambda: not owner.server.connections)
                made.clear()
        await until(lambda: not owner.server._pending)


async def test_a_full_memory_of_what_may_be_sent_again_stops_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides may not write data until the other says what arrived: they still say it."""
    monkeypatch.setattr(kept, "MAX_UNACKNOWLEDGED_BYTES", 30_000)
    monkeypatch.setattr(streams, "SAY_ARRIVED_BYTES", 10_000)
    async with far(Cut("to server", 100_000), Cut("to client", 50_000), tcp=True) as one:
        await arrays_both_ways(one, 30)
        assert one.connection.reconnection.cuts >= 1
        outbox = one.connection.outbox
        assert outbox.unacknowledged is not None
        assert outbox.unacknowledged.written - outbox.unacknowledged.arrived < 30_000 + 512 * 1024
