"""Shards that lie where their elements are in the tensor."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_async.backends.reshard import Reservations, reserved
from tests.backends.reshard.memory import MEGABYTE, lazily_free, own_bytes

KEPT_HERE = "w", "a"
"""kind and name"""


@pytest.fixture(autouse=True)
def given_up_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes at once what it may take at any time."""
    monkeypatch.setattr(reserved, "MARK_FREE", mmap.MADV_DONTNEED)


class Rank:
    """One that holds some rows of a tensor; every element is the number of its row, from 1 on."""

    def __init__(self, rows: int, width: int) -> None:
        self.truth = torch.arange(1, rows + 1, dtype=torch.float32)[:, None].expand(rows, width)
        self.reserved = Reservations()
        self.shard: Tensor | None = None
        self.rows = range(0)

    def hold(self, low: int, high: int) -> Tensor:
        """Change over to other rows as a rescale does: first room, then what is missing comes."""
        new = self.prepare(low, high)
        new.copy_(self.truth[low:high])
        self.shard, self.rows = new, range(low, high)
        self.reserved.mark_free()
        return new

    def prepare(self, low: int, high: int) -> Tensor:
        """Make room for rows, and fill it with what nobody may see, but for what is kept there."""
        new = self.room(low, high)
        if self.shard is not None and self.begin(new, low) == self.begin(
            self.shard, self.rows.start
        ):
            for row in range(low, high):
                if row in self.rows:
                    assert new[row - low].equal(self.truth[row])
                else:
                    new[row - low] = -1.0
        return new

    def begin(self, shard: Tensor, first: int) -> int:
        """Where the tensor would begin in memory, by a shard of it."""
        return shard.data_ptr() - first * self.width

    def room(self, low: int, high: int) -> Tensor:
        rows, width = self.truth.shape
        return self.reserved.room(
            *KEPT_HERE,
            (rows, width),
            low * width,
            (high - low, width),
            torch.float32,
            self.shard,
        )

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.truth.shape[1] * 4


def shards(rows: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, rows), st.integers(0, rows)).map(
        lambda ends: (min(ends), max(ends))
    )


def slice_of(rows: range) -> slice:
    return slice(rows.start, rows.stop)


ROWS, WIDTH = 96, 3000


@settings(deadline=None, max_examples=150)
@given(
    changes=st.lists(st.tuples(shards(ROWS), st.booleans(), st.booleans()), min_size=1, max_size=10)
)
def test_whoever_looks_at_a_shard_sees_its_rows_whatever_the_rank_holds_later(
    changes: list[tuple[tuple[int, int], bool, bool]],
) -> None:
    rank = Rank(ROWS, WIDTH)
    looked_at: list[tuple[Tensor, tuple[int, int]]] = []
    for rows, looks, fails in changes:
        new = rank.prepare(*rows)
        assert all(tensor.equal(rank.truth[low:high]) for tensor, (low, high) in looked_at)
        del new
        if not fails:
            looked_at.append((rank.hold(*rows), rows))
            looked_at = looked_at if looks else looked_at[:-1]
        assert rank.shard is None or rank.shard.equal(rank.truth[slice_of(rank.rows)])
        assert all(tensor.equal(rank.truth[low:high]) for tensor, (low, high) in looked_at)


def test_what_a_rank_keeps_stays_where_it_is() -> None:
    rank = Rank(ROWS, WIDTH)
    whole = rank.hold(0, 96)
    assert rank.hold(24, 48).data_ptr() == whole.data_ptr() + 24 * rank.width
    begin = whole.data_ptr()
    del whole
    back = rank.hold(0, 96)
    assert back.data_ptr() == begin


def test_a_shard_lies_elsewhere_while_somebody_looks_at_what_it_would_overwrite() -> None:
    rank = Rank(ROWS, WIDTH)
    before = rank.hold(0, 48)
    begin = before.data_ptr()
    rank.hold(0, 24)
    assert rank.hold(0, 48).data_ptr() != begin
    assert before.equal(rank.truth[:48])
    del before
    assert rank.hold(0, 48).data_ptr() == begin


def test_what_nobody_looks_at_goes_back_and_nothing_else() -> None:
    rank = Rank(8192, 4096)  # 128 MiB
    empty = own_bytes()
    whole = rank.hold(0, 8192)
    assert own_bytes() - empty == pytest.approx(128 * MEGABYTE, abs=4 * MEGABYTE)
    rank.hold(2048, 4096)
    assert own_bytes() - empty == pytest.approx(128 * MEGABYTE, abs=4 * MEGABYTE)
    looked_at = whole[6000:6001].numpy()
    del whole
    rank.reserved.mark_free()
    assert own_bytes() - empty == pytest.approx(128 * MEGABYTE, abs=4 * MEGABYTE)
    assert (looked_at == 6001).all()
    del looked_at
    rank.reserved.mark_free()
    assert own_bytes() - empty == pytest.approx(32 * MEGABYTE, abs=4 * MEGABYTE)
    rank.reserved.give_back()
    assert rank.shard is not None
    assert rank.shard.equal(rank.truth[2048:4096])
    rank.shard = None
    assert own_bytes() - empty == pytest.approx(0, abs=4 * MEGABYTE)


def test_given_up_memory_is_the_systems_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # really MADV_FREE
    rank = Rank(8192, 4096)
    rank.hold(0, 8192)
    before = lazily_free()
    rank.hold(0, 2048)
    assert lazily_free() - before == pytest.approx(96 * MEGABYTE, abs=4 * MEGABYTE)


def test_a_shard_takes_no_more_memory_than_it_has_elements() -> None:
    """A large page at its edges would."""
    rank = Rank(8192, 4096)
    room = rank.room(150, 800)  # 2.3 .. 12.5 MiB
    empty = own_bytes()
    room.fill_(1.0)
    assert own_bytes() - empty == pytest.approx(650 * rank.width, abs=MEGABYTE / 2)


def test_shards_end_in_any_thread_and_in_a_garbage_collection() -> None:
    rank = Rank(ROWS, WIDTH)
    circle: list[Any] = [rank.hold(0, 96)]
    circle.append(circle)
    rank.hold(0, 24)
    begin = circle[0].data_ptr()
    del circle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert rank.hold(0, 96).data_ptr() == begin


def test_a_garbage_collection_amid_it_all_ends_other_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(8192, 4096)
    circle: list[Any] = [rank.room(4096, 8192)]
    circle.append(circle)
    begin = circle[0].data_ptr()
    del circle
    advise = reserved._Reserved._advise

    def collect(*given: Any) -> None:
        gc.collect()
        advise(*given)

    gc.disable()
    try:
        monkeypatch.setattr(reserved._Reserved, "_advise", collect)
        rank.hold(0, 4096)
        rank.hold(0, 2048)
    finally:
        gc.enable()
    assert rank.room(4096, 8192).data_ptr() == begin


def test_a_shard_of_another_dtype_lies_elsewhere() -> None:
    """Its bytes would be others, and the old shard is needed until the new one stands."""
    reservations, shape = Reservations(), (1024, 1024)
    old = reservations.room(*KEPT_HERE, shape, 0, shape, torch.bfloat16).fill_(3.0)
    new = reservations.room(*KEPT_HERE, shape, 0, shape, torch.float16, old)
    new.copy_(old)
    assert (old == 3.0).all()


def test_without_address_space_shards_come_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("rlinf_async.backends.reshard.reserved.mmap.mmap", refused)
    rank = Rank(ROWS, WIDTH)
    assert rank.hold(0, 0).shape == (0, WIDTH)
    assert rank.hold(0, 96).equal(rank.truth)
    assert rank.hold(24, 48).equal(rank.truth[24:48])
