"""Large arrays in shared memory, between two sides of a connection."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Latest, Receiver, Sender
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import ConnectionLost, MalformedFrame
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import Connection
from rlinf_async.channels.wire.frames import LATER
from rlinf_async.channels.wire.pool import Pool
from rlinf_async.channels.wire.protocol import (
    Announce,
    Notice,
    NotOpened,
    Opened,
    Place,
    Released,
    Retired,
    encode,
)
from rlinf_async.channels.wire.sharing import Borrowing, Lending, Progress
from rlinf_async.channels.wire.slab import PAGE, TOKEN_BYTES, Slab, is_private, make_slab, view_of
from tests.channels.wire.harness import Wired, until, wired

SIZE = 50_000


class Item(msgspec.Struct):
    values: NDArray[np.float32]


class TensorItem(msgspec.Struct):
    values: torch.Tensor


def item(value: float) -> Item:
    return Item(np.full(SIZE, value, np.float32))


async def ready(sender: Sender[Item], receiver: Receiver[Item], owner: Wired) -> None:
    """Let both sides open each other's memory."""
    await sender.put(item(0))
    await receiver.get()
    (theirs,) = owner.server.connections
    assert theirs.memory.sent_shared == 1


@asynccontextmanager
async def edge(
    **options: Any,
) -> AsyncIterator[tuple[Wired, Connection, Channel[Item], Sender[Item], Receiver[Item]]]:
    """A channel, and its ends in another process that has the owner's memory open."""
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8, **options)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        await ready(sender, receiver, owner)
        yield owner, connection, channel, sender, receiver
        connection.close()
        await connection.wait_closed()


async def test_the_first_large_array_waits_until_the_peer_has_the_memory_open() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        for value in range(3):
            await sender.put(item(value))
        assert [float((await receiver.get()).values[-1]) for _ in range(3)] == [0, 1, 2]
        (theirs,) = owner.server.connections
        assert connection.memory.sent_copied == theirs.memory.sent_copied == 0
        assert connection.sent_bytes + theirs.sent_bytes < 4000


async def test_what_waits_for_the_memory_may_be_cancelled() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        putting = asyncio.create_task(sender.put(item(1)))
        said = connection.sent_bytes
        await until(lambda: connection.sent_bytes > said)  # only about the memory
        assert connection.unsent == 1
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert connection.unsent == 0
        await sender.put(item(2))
        assert (channel.receiver.get_nowait().values == 2).all()


async def test_a_connection_that_closes_does_not_wait_for_the_memory() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        putting = asyncio.create_task(sender.put(item(1)))
        await until(lambda: connection.unsent)
        connection.close()
        with pytest.raises(ConnectionLost):
            await putting
        await owner.lost.get()
        assert (channel.receiver.get_nowait().values == 1).all()
        assert connection.memory.sent_copied == 1


async def test_the_second_large_array_crosses_without_the_socket() -> None:
    async with edge() as (owner, connection, channel, sender, receiver):
        (theirs,) = owner.server.connections
        before = connection.sent_bytes + theirs.sent_bytes
        use = connection.memory
        await sender.put(item(7))
        taken = await receiver.get()
        assert (taken.values == 7).all()
        assert connection.sent_bytes + theirs.sent_bytes - before < 2000
        assert connection.memory.sent_shared == use.sent_shared + 1
        assert connection.memory.received_shared == use.received_shared + 1
        assert connection.memory.refused == ""
        seen = statistics_of(channel.queue)
        assert seen.copied == 0
        assert seen.shared == seen.puts == 2


async def test_small_arrays_never_do() -> None:
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender = owner.sender(channel, connection)
        for _ in range(3):
            await sender.put(Item(np.zeros(2000, np.float32)))
        use = connection.memory
        assert (use.sent_shared, use.sent_copied) == (0, 0)
        seen = statistics_of(channel.queue)
        assert (seen.shared, seen.copied) == (0, 0)


async def test_what_is_not_used_any_more_is_lent_again() -> None:
    async with edge() as (owner, connection, _, sender, receiver):
        places = set()
        for value in range(20):
            await sender.put(item(value))
            taken = await receiver.get()
            assert (taken.values == value).all()
            places.add(taken.values.ctypes.data)
            del taken
            (theirs,) = owner.server.connections
            await until(lambda: connection.memory.lent == theirs.memory.lent == 0)  # noqa: B023
        assert len(places) <= 2


async def test_an_array_is_kept_while_anything_is_made_of_it() -> None:
    async with edge() as (_, connection, _, sender, receiver):
        await sender.put(item(1))
        part = (await receiver.get()).values[10:20]
        for value in range(2, 10):
            await sender.put(item(value))
            await receiver.get()
        assert (part == 1).all()
        lent = connection.memory.lent
        assert lent >= 1
        del part
        await until(lambda: connection.memory.lent < lent)


async def test_another_thread_may_be_the_last_to_use_an_array() -> None:
    async with edge() as (owner, connection, _, sender, receiver):
        await sender.put(item(1))
        held = [await receiver.get()]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        (theirs,) = owner.server.connections
        await until(lambda: connection.memory.lent == theirs.memory.lent == 0)


async def test_tensors_lie_in_shared_memory_too_and_can_be_written() -> None:
    async with edge() as (owner, connection, _, _, _):
        channel = Channel(TensorItem, name="tensors", capacity=8)
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        before = connection.memory.sent_shared
        await sender.put(TensorItem(torch.full((SIZE,), 3, dtype=torch.bfloat16)))
        taken = await receiver.get()
        assert connection.memory.sent_shared == before + 1
        taken.values += 1
        assert (taken.values == 4).all()


async def test_what_a_failed_holder_wrote_is_not_delivered_again() -> None:
    async with edge() as (_, _, _, sender, receiver):
        await sender.put(item(5))
        kept = []

        async def fail() -> None:
            async with receiver.lease() as batch:
                kept.append(batch[0].values)
                batch[0].values *= 100
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            await fail()
        again = await receiver.get()
        assert (again.values == 5).all()
        again.values += 1
        assert (kept[0] == 500).all()


async def test_two_readers_of_a_latest_do_not_see_what_the_other_writes() -> None:
    async with edge() as (owner, connection, _, _, _):
        latest = Latest(Item, name="weights")
        readers = [owner.latest_receiver(latest, connection) for _ in range(3)]
        await latest.sender.publish(item(1))
        found = [await reader.get() for reader in readers]
        for value, one in enumerate(found):
            one.values[:] = value
        assert [float(one.values.max()) for one in found] == [0, 1, 2]


async def test_an_array_outlives_its_connection_unchanged() -> None:
    async with edge() as (owner, connection, channel, sender, receiver):
        await sender.put(item(1))
        taken = await receiver.get()
        connection.abort("cut")
        await owner.lost.get()
        other = await owner.join("other")
        sender, receiver = owner.sender(channel, other), owner.receiver(channel, other)
        for value in range(2, 12):
            await sender.put(item(value))
            await receiver.get()
        assert (taken.values == 1).all()
        other.close()
        await other.wait_closed()


async def test_an_answer_that_nobody_took_is_released() -> None:
    async with edge() as (owner, connection, channel, sender, receiver):
        getting = asyncio.create_task(receiver.get())
        await until(lambda: statistics_of(channel.queue).waiting_getters)
        putting = asyncio.create_task(sender.put(item(3)))
        await until(lambda: statistics_of(channel.queue).gets)  # the answer is on its way
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        await putting
        assert ((await receiver.get()).values == 3).all()
        (theirs,) = owner.server.connections
        await until(lambda: connection.memory.lent == theirs.memory.lent == 0)


async def test_several_items_of_one_batch_are_shared() -> None:
    async with edge() as (_, connection, _, sender, receiver):
        for value in range(4):
            await sender.put(item(value))
        before = connection.memory.received_shared
        batch = await receiver.get_batch(weight=4)
        assert [float(one.values[-1]) for one in batch] == [0, 1, 2, 3]
        assert connection.memory.received_shared == before + 1


async def test_no_memory_means_the_socket_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "take", lambda *_, **__: None)
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        for value in range(3):
            await sender.put(item(value))
            assert ((await receiver.get()).values == value).all()
        use = connection.memory
        assert (use.sent_shared, use.sent_copied, use.received_copied) == (0, 3, 3)
        assert statistics_of(channel.queue).copied == 3


async def test_where_the_system_has_no_memory_the_socket_is_used_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (soft, hard) = Pool(), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("rlinf_async.channels.wire.session.connection.process_pool", lambda: pool)
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))  # of files in memory, too
        try:
            for value in range(3):
                await sender.put(item(value))
                assert ((await receiver.get()).values == value).all()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert connection.memory.sent_copied == 3
        assert pool.refused >= 3
    said = "large arrays go through the socket, not shared memory: the system gives no more"
    assert caplog.text.count(said) == 1


async def test_a_peer_that_cannot_open_the_memory_gets_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.sharing.MAX_SLABS", 0)
    async with wired() as owner:
        channel = Channel(Item, name="items", capacity=8)
        connection = await owner.join()
        sender, receiver = owner.sender(channel, connection), owner.receiver(channel, connection)
        for value in range(4):
            await sender.put(item(value))
            assert ((await receiver.get()).values == value).all()
        assert connection.memory.refused == "0 pieces of its memory are open here"
        (said,) = [one.message for one in caplog.records if "to owner" in one.message]
        assert said == (
            "large arrays go to owner through the socket, not shared memory: 0 pieces of its "
            "memory are open here"
        )


# ---- arrays that take their time

PIECE = 100_000
LARGE = 10 * PIECE // 4
"""elements of ten pieces"""


class Turns:
    """The pool of this process, and how much was copied into it in which turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = pool = Pool(limit=1024**2 + 4 * PAGE, slab_bytes=1024**2 + 4 * PAGE)
        self.copied: list[int] = []
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)
        share = Lending.share

        def counted(lending: Lending, *arguments: Any) -> Any:
            shared, copied = share(lending, *arguments)
            self._count += copied
            return shared, copied

        monkeypatch.setattr("rlinf_async.channels.wire.sharing.PIECE_BYTES", PIECE)
        pools = "rlinf_async.channels.wire.session.connection.process_pool"
        monkeypatch.setattr(pools, lambda: pool)
        monkeypatch.setattr(Lending, "share", counted)

    def _turn(self) -> None:
        if self._count:
            self.copied.append(self._count)
        self._count = 0
        self._handle = self._loop.call_soon(self._turn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("put", [True, False], ids=["put", "get"])
async def test_large_arrays_are_copied_a_piece_for_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, put: bool
) -> None:
    async with wired() as owner:
        with Turns(monkeypatch) as turns:
            channel = Channel(Item, name="items", capacity=8)
            connection = await owner.join()
            large = Item(np.arange(LARGE, dtype=np.float32))
            if put:
                await owner.sender(channel, connection).put(large)
                taken = channel.receiver.get_nowait()
                sent = connection.memory
            else:
                await channel.sender.put(large)
                taken = await owner.receiver(channel, connection).get()
                (theirs,) = owner.server.connections
                sent = theirs.memory
            assert (taken.values == large.values).all()
            assert sent.sent_shared == 1
            assert turns.copied == [PIECE] * 10
        connection.close()
        await connection.wait_closed()


async def test_what_is_put_behind_a_large_array_does_not_overtake_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with wired() as owner:
        with Turns(monkeypatch) as turns:
            channel = Channel(Item, name="items", capacity=8)
            connection = await owner.join()
            sender = owner.sender(channel, connection)
            puts = [
                asyncio.create_task(sender.put(Item(np.full(size, size, np.float32))))
                for size in (LARGE, 20_000, 10)
            ]
            await asyncio.gather(*puts)
            assert len(turns.copied) >= 10
            found = [channel.receiver.get_nowait().values.size for _ in range(3)]
            assert found == [LARGE, 20_000, 10]


async def test_a_put_that_is_cancelled_in_the_middle_of_its_copy_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with wired() as owner:
        with Turns(monkeypatch) as turns:
            channel = Channel(Item, name="items", capacity=8)
            connection = await owner.join()
            sender = owner.sender(channel, connection)
            putting = asyncio.create_task(sender.put(Item(np.zeros(LARGE, np.float32))))
            await until(lambda: len(turns.copied) == 3)
            assert not putting.done()
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            del putting
            assert connection.unsent == 0
            assert connection.memory.sent_shared == connection.memory.sent_copied == 0
            whole = turns.pool.take([4 * LARGE])
            assert whole is not None
            del whole
            await sender.put(Item(np.ones(LARGE, np.float32)))
            assert (channel.receiver.get_nowait().values == 1).all()
            assert statistics_of(channel.queue).puts == 1


async def test_a_large_array_arrives_whole_though_its_connection_closes_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with wired() as owner:
        with Turns(monkeypatch) as turns:
            channel = Channel(Item, name="items", capacity=8)
            connection = await owner.join()
            sender = owner.sender(channel, connection)
            large = Item(np.arange(LARGE, dtype=np.float32))
            putting = asyncio.create_task(sender.put(large))
            await until(lambda: len(turns.copied) == 3)
            connection.close()
            with pytest.raises(ConnectionLost):
                await putting
            await owner.lost.get()
            assert (channel.receiver.get_nowait().values == large.values).all()


async def test_where_memory_ends_in_the_middle_of_a_copy_the_socket_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with wired() as owner:
        with Turns(monkeypatch) as turns:
            channel = Channel(Item, name="items", capacity=8)
            connection = await owner.join()
            sender = owner.sender(channel, connection)
            back = Slab.back

            def little(slab: Slab, start: int, stop: int) -> None:
                if stop > PAGE + 3 * PIECE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                back(slab, start, stop)

            monkeypatch.setattr(Slab, "back", little)
            large = Item(np.arange(LARGE, dtype=np.float32))
            await sender.put(large)
            assert (channel.receiver.get_nowait().values == large.values).all()
            assert connection.memory.sent_copied == 1
            assert turns.pool.refused == 1
            assert turns.pool.take([900_000], back=False) is not None
            assert "the system gives no more" in caplog.text


# ---- the two halves, without a socket


class Halves:
    """A lender and a borrower in one process."""

    def __init__(self) -> None:
        self.pool = Pool(limit=3 * 1024**2, slab_bytes=1024**2)
        self.said: list[Notice] = []
        self.released: list[int] = []
        self.gone: list[int] = []
        self.lending = Lending(self.pool, self.said.append, self.gone.append)
        self.borrowing = Borrowing(
            self.said.append, lambda number, poisoned: self.released.append(number)
        )

    def open(self) -> int:
        """The number of a slab that the borrower has opened."""
        assert self.lending.share(self.body())[0] is LATER
        announce = self.said.pop()
        assert isinstance(announce, Announce)
        self.borrowing.announced(announce, os.getpid())
        opened = self.said.pop()
        assert isinstance(opened, Opened)
        self.lending.opened(opened)
        return announce.slab

    def body(self) -> Encoded:
        return Encoded(b"data", [bytearray(b"small"), bytearray(b"x" * 100_000)])


def test_a_body_comes_out_as_it_went_in() -> None:
    halves = Halves()
    halves.open()
    travels, copied = halves.lending.share(halves.body())
    assert isinstance(travels, Encoded)
    assert copied == 100_005
    assert travels.nbytes < 100
    found = halves.borrowing.restore(travels)
    assert [bytes(buffer) for buffer in found.buffers] == [b"small", b"x" * 100_000]
    assert all(is_private(buffer) for buffer in found.buffers)
    assert halves.released == []
    del found
    assert halves.released == [1]


def test_a_body_is_copied_once_for_all_who_get_it() -> None:
    halves = Halves()
    halves.open()
    body = halves.body()
    assert [halves.lending.share(body)[1] for _ in range(3)] == [100_005, 0, 0]


def test_a_large_body_is_copied_once_by_all_who_send_it_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.sharing.PIECE_BYTES", 30_000)
    first, second = Halves(), Halves()
    second.lending = Lending(first.pool, second.said.append, second.gone.append)
    body, copied, progress = first.body(), 0, (Progress(), Progress())
    for _ in range(3):
        for lending, one in zip((first.lending, second.lending), progress, strict=True):
            shared, more = lending.share(body, one)
            assert shared is LATER  # for the peer, in the end
            copied += more
    assert copied == 100_005
    assert all(one.pending is None for one in progress)
    assert all(view_of(buffer) is not None for buffer in body.buffers)
    assert [bytes(buffer) for buffer in body.buffers] == [b"small", b"x" * 100_000]
    assert [type(notice) for notice in first.said + second.said] == [Announce, Announce]


def test_a_large_body_that_finds_no_memory_is_not_taken_for_a_whole_one_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.sharing.PIECE_BYTES", 30_000)
    halves = Halves()
    body, progress = halves.body(), [Progress(), Progress()]
    assert [halves.lending.share(body, one)[0] for one in progress] == [LATER, LATER]

    def nothing(slab: Slab, start: int, stop: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(Slab, "back", nothing)
    assert [halves.lending.share(body, one)[0] for one in progress] == [None, None]
    assert all(view_of(buffer) is None for buffer in body.buffers)
    assert halves.pool.refused == 1


def test_a_forwarded_body_is_not_copied() -> None:
    first, second = Halves(), Halves()
    first.open()
    travels, _ = first.lending.share(first.body())
    assert isinstance(travels, Encoded)
    forwarded = first.borrowing.restore(travels)
    assert second.lending.share(forwarded) == (LATER, 0)  # its slab is announced first
    announce = second.said.pop()
    assert isinstance(announce, Announce)
    second.borrowing.announced(announce, os.getpid())
    second.lending.opened(Opened(announce.slab))
    again, copied = second.lending.share(forwarded)
    assert isinstance(again, Encoded)
    assert copied == 0
    found = second.borrowing.restore(again)
    assert bytes(found.buffers[1]) == b"x" * 100_000
    del forwarded
    assert first.released == []
    del found
    second.lending.take_back(Released(list(second.lending.lent), []))
    assert first.released == [1]


def test_a_slab_that_goes_is_retired() -> None:
    gc.collect()  # or else files of others, which nobody uses any more, may be closed meanwhile
    halves = Halves()
    number = halves.open()
    files = len(os.listdir("/proc/self/fd"))
    halves.pool.lend([bytearray(5 * 1024**2 // 2)])  # there is no room for both
    assert halves.gone == [number]
    halves.borrowing.retired(Retired(number))
    assert len(os.listdir("/proc/self/fd")) == files - 2


def test_an_unknown_process_is_refused() -> None:
    halves = Halves()
    slab = make_slab(2 * PAGE)
    halves.borrowing.announced(Announce(1, slab.fd, slab.token), 0)
    (refused,) = halves.said
    assert isinstance(refused, NotOpened)
    assert "it is not known which process" in refused.reason


HOSTILE = [
    ([Place(1, 10**9, PAGE, 100)], "slab 1000000000 of shared memory was not announced"),
    ([Place(1, 0, PAGE, 2**62)], "bytes at 4096 of shared memory"),
    ([Place(1, 0, 1024**2 - 50, 100)], "100 bytes at 1048526 of shared memory that has 1048576"),
    ([Place(1, 0, -5000, 100)], "100 bytes at -5000"),
    ([Place(1, 0, 0, 100)], "100 bytes at 0"),
    ([Place(1, 0, PAGE, 0)], "0 bytes at 4096"),
    ([Place(1, 0, PAGE, -1)], "-1 bytes at 4096"),
    ([Place(1, 0, 2**63, 2**63)], "of shared memory"),
    ([None], "1 arrays, 0 of them not shared"),
    ([Place(1, 0, PAGE, 1024**2 - PAGE)] * 4000, "bytes shared, 2147483648 are allowed"),
]


@pytest.mark.parametrize(("places", "message"), HOSTILE)
def test_a_place_outside_of_what_was_lent_is_malformed(
    places: list[Place | None], message: str
) -> None:
    halves = Halves()
    number = halves.open()
    named = [one and msgspec.structs.replace(one, slab=one.slab or number) for one in places]
    with pytest.raises(MalformedFrame, match=message):
        halves.borrowing.restore(Encoded(b"", [bytearray(encode(named))]))


@given(st.binary(max_size=200))
def test_no_table_of_places_does_more_than_be_refused(table: bytes) -> None:
    halves = Halves()
    halves.open()
    try:
        found = halves.borrowing.restore(Encoded(b"", [bytearray(table)]))
    except (MalformedFrame, msgspec.DecodeError):
        return
    assert list(found.buffers) == []


@given(
    st.lists(
        st.tuples(st.integers(-2, 5), st.integers(-PAGE, 2**21), st.integers(-2, 2**21)), max_size=5
    )
)
def test_every_place_is_inside_or_refused(places: list[tuple[int, int, int]]) -> None:
    halves = Halves()
    number = halves.open()
    table = encode([Place(loan, number, offset, size) for loan, offset, size in places])
    inside = all(s > 0 and PAGE <= at <= 1024**2 - s for _, at, s in places)
    try:
        found = halves.borrowing.restore(Encoded(b"", [bytearray(table)]))
    except MalformedFrame:
        assert not inside
        return
    assert inside
    assert [len(buffer) for buffer in found.buffers] == [size for *_, size in places]
    assert all(bytes(buffer) is not None for buffer in found.buffers)


@pytest.mark.parametrize("notice", [Released([5], []), Released([], [5])])
def test_what_was_not_lent_cannot_be_released(notice: Released) -> None:
    with pytest.raises(MalformedFrame, match="part 5 of shared memory was released"):
        Halves().lending.take_back(notice)


def test_a_peer_cannot_have_any_number_of_slabs_opened() -> None:
    halves = Halves()
    slab = make_slab(2 * PAGE)
    for number in range(300):
        halves.borrowing.announced(Announce(number, slab.fd, slab.token), os.getpid())
    kinds = [type(notice) for notice in halves.said]
    assert kinds == [Opened] * 256 + [NotOpened] * 44


def test_a_token_of_another_slab_is_refused() -> None:
    halves = Halves()
    slab = make_slab(2 * PAGE)
    halves.borrowing.announced(Announce(1, slab.fd, bytes(TOKEN_BYTES)), os.getpid())
    assert isinstance(halves.said[0], NotOpened)
