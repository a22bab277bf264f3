"""Slabs and their pool, without a connection."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import pytest

from rlinf_async.channels.wire.pool import Pool
from rlinf_async.channels.wire.slab import (
    PAGE,
    TOKEN_BYTES,
    SlabRefused,
    make_slab,
    open_slab,
    view_of,
    was_written,
)

MIB = 1024**2


@pytest.fixture
def descriptor() -> Iterator[int]:
    """An open file of this process that is no slab."""
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


def lend(pool: Pool, *sizes: int) -> list[memoryview]:
    views = pool.lend([bytearray([index % 251]) * size for index, size in enumerate(sizes)])
    assert views is not None
    return views


def place(views: list[memoryview]) -> int:
    """Where the first of them lies."""
    view = view_of(views[0])
    assert view is not None
    return view.offset


def test_what_is_lent_is_a_copy_and_comes_back_when_its_views_are_gone() -> None:
    pool = Pool(limit=4 * MIB, slab_bytes=2 * MIB)
    views = lend(pool, 5000, 70_000)
    assert [bytes(view[:3]) for view in views] == [b"\0\0\0", b"\1\1\1"]
    offset = place(views)
    del views
    assert place(lend(pool, 5000)) == offset
    assert pool.size == 2 * MIB


def test_a_slice_of_a_view_keeps_what_is_lent() -> None:
    pool = Pool(limit=MIB, slab_bytes=MIB)
    part = lend(pool, MIB // 2)[0][100:200]
    assert pool.lend([bytearray(MIB // 2)]) is None
    del part
    lend(pool, MIB // 2)


def test_what_is_in_a_cycle_comes_back_when_that_is_collected() -> None:
    pool = Pool(limit=MIB, slab_bytes=MIB)
    cycle: list[Any] = lend(pool, MIB // 2)
    cycle.append(cycle)
    del cycle
    gc.collect()
    lend(pool, MIB // 2)


def test_what_another_thread_lets_go_of_comes_back() -> None:
    pool = Pool(limit=MIB, slab_bytes=MIB)
    held = lend(pool, MIB // 2)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    lend(pool, MIB // 2)


def test_a_full_pool_refuses_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(limit=2 * MIB, slab_bytes=MIB)
    held = [lend(pool, 900_000), lend(pool, 900_000)]
    with caplog.at_level(logging.WARNING):
        assert pool.lend([bytearray(900_000)]) is None
        assert pool.lend([bytearray(900_000)]) is None
    assert pool.refused == 2
    assert [record.message for record in caplog.records] == [
        "large arrays go through the socket, not shared memory: all 2 MiB of it are in use"
    ]
    held.clear()
    lend(pool, 900_000)
    assert pool.size == 2 * MIB


def test_idle_slabs_make_room_for_a_larger_one() -> None:
    pool = Pool(limit=4 * MIB, slab_bytes=MIB)
    lend(pool, 900_000)
    lend(pool, 3 * MIB + 500_000)
    assert pool.size <= 4 * MIB


def test_the_memory_of_a_poisoned_loan_is_never_written_again() -> None:
    pool = Pool(limit=2 * MIB, slab_bytes=MIB)
    views = lend(pool, 1000)
    view = view_of(views[0])
    assert view is not None
    slab = view.loan.slab
    view.loan.poisoned = True
    del views, view
    for _ in range(3):
        later = view_of(lend(pool, 1000)[0])
        assert later is not None
        assert later.loan.slab is not slab
    assert pool.size == MIB


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE])
def test_a_system_without_memory_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    pool = Pool()
    for function in ("memfd_create", "posix_fallocate"):
        monkeypatch.setattr(os, function, refuse)
        assert pool.lend([bytearray(100_000)]) is None
        monkeypatch.undo()
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    lend(pool, 100_000)


# ---- slabs of other processes (here: this one, opened once more)


def test_what_is_written_to_an_opened_slab_stays_here() -> None:
    made = make_slab(4 * PAGE)
    made.memory[PAGE : PAGE + 5] = b"maker"
    opened = open_slab(os.getpid(), made.fd, made.token)
    assert opened.memory[PAGE : PAGE + 5] == b"maker"
    opened.use(PAGE, 2 * PAGE)
    opened.memory[PAGE : PAGE + 5] = b"taker"
    assert made.memory[PAGE : PAGE + 5] == b"maker"
    assert opened.read(PAGE, 5) == b"maker"
    opened.unuse(PAGE, 2 * PAGE)
    assert opened.memory[PAGE : PAGE + 5] == b"maker"


class Interrupted(int):
    """A number; while it is first compared, something else happens."""

    def __new__(cls, value: int, meanwhile: Callable[[], None]) -> Self:
        made = super().__new__(cls, value)
        made.meanwhile = [meanwhile]
        return made

    meanwhile: list[Callable[[], None]]

    def __lt__(self, other: int) -> bool:
        if self.meanwhile:
            self.meanwhile.pop()()
        return int(self) < other


def in_another_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [in_another_thread, lambda call: call()], ids=["thread", "within"])
def test_two_arrays_never_share_pages_though_a_third_goes_while_it_is_looked_at(
    run: Callable[[Callable[[], None]], None],
) -> None:
    slab = make_slab(8 * PAGE)
    parts = [(PAGE, 2 * PAGE), (3 * PAGE, 4 * PAGE), (5 * PAGE, 6 * PAGE)]
    for used in parts:
        for gone in parts:
            if gone == used:
                continue
            for part in parts:
                assert not slab.in_use(*part)
                slab.use(*part)
            start = Interrupted(used[0], partial(run, partial(slab.unuse, *gone)))
            assert slab.in_use(start, used[1])
            assert not slab.in_use(*gone)
            for part in parts:
                if part != gone:
                    slab.unuse(*part)


def test_a_part_whose_copy_is_read_in_several_steps_is_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab = make_slab(4 * PAGE)
    slab.memory[PAGE : PAGE + 2000] = bytes(range(200)) * 10
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:700]], at))
    assert slab.read(PAGE, 2000) == bytes(range(200)) * 10


def test_an_opened_slab_outlives_its_maker() -> None:
    made = make_slab(2 * PAGE)
    made.memory[PAGE : PAGE + 5] = b"maker"
    opened = open_slab(os.getpid(), made.fd, made.token)
    del made
    assert opened.memory[PAGE : PAGE + 5] == b"maker"


def test_nobody_can_shrink_a_slab() -> None:
    made = make_slab(2 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, PAGE)


def test_a_slab_stands_in_no_folder() -> None:
    made = make_slab(2 * PAGE)
    assert not [name for name in os.listdir("/dev/shm") if "rlinf" in name]
    assert os.stat(made.fd).st_nlink == 0


def test_what_is_no_slab_is_refused(descriptor: int) -> None:
    with pytest.raises(SlabRefused, match="is not memory"):
        open_slab(os.getpid(), descriptor, bytes(TOKEN_BYTES))
    with pytest.raises(SlabRefused, match="cannot open /proc/"):
        open_slab(os.getpid(), 10_000_000, bytes(TOKEN_BYTES))


def test_memory_that_could_shrink_is_refused() -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 2 * PAGE)
    with pytest.raises(SlabRefused, match="could shrink while it is read"):
        open_slab(os.getpid(), loose, bytes(TOKEN_BYTES))
    os.close(loose)


@pytest.mark.parametrize("token", [b"", bytes(TOKEN_BYTES)])
def test_another_slab_than_the_one_meant_is_refused(token: bytes) -> None:
    made = make_slab(2 * PAGE)
    with pytest.raises(SlabRefused, match="do both sides share /proc"):
        open_slab(os.getpid(), made.fd, token)


def test_refusing_leaves_no_file_open(descriptor: int) -> None:
    gc.collect()  # or else files of others, which nobody uses any more, may be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SlabRefused):
            open_slab(os.getpid(), descriptor, bytes(TOKEN_BYTES))
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_it_cannot_be_told_a_page_counts_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_async.channels.wire.slab._pagemap", lambda pid: -1)
    assert was_written(0, PAGE)
