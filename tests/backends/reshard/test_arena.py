"""Memory that is used again for the tensors of other strategies."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_async.backends.reshard import Arena, address_space
from tests.backends.reshard.memory import MEGABYTE, lazily_free, own_bytes

CPU = torch.device("cpu")
QUARTER = MEGABYTE // 16
"""of a mebibyte, float32"""


@pytest.fixture(autouse=True)
def given_up_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes at once what it may take at any time."""
    monkeypatch.setattr(address_space, "MARK_FREE", mmap.MADV_DONTNEED)


def make(arena: Arena, mebibytes: float, value: float = 1.0) -> Tensor:
    made = arena.empty((int(mebibytes * 4), QUARTER), torch.float32, CPU)
    return made.fill_(value)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(4, 40), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_no_two_tensors_that_anything_refers_to_overlap(
    changes: list[tuple[int, list[int], bool]],
) -> None:
    arena, held = Arena(64 * MEGABYTE), dict[int, Tensor]()
    for value, (quarters, leaving, gives_back) in enumerate(changes):
        whole = make(arena, quarters / 4, value)
        held[value] = whole[1:] if value % 2 else whole  # a view keeps all of it
        for at in leaving:
            held.pop(at, None)
        if gives_back:
            arena.give_back()
        assert all(bool((one == number).all()) for number, one in held.items())
        ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in held.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_what_was_touched_before_comes_first() -> None:
    arena = Arena()
    first, second = make(arena, 32), make(arena, 16)
    begin, empty = first.data_ptr(), own_bytes()
    del first
    again = [make(arena, 20), make(arena, 12)]
    assert [one.data_ptr() - begin for one in again] == [0, 20 * MEGABYTE]
    assert make(arena, 4).data_ptr() > second.data_ptr()
    assert own_bytes() - empty == pytest.approx(0, abs=6 * MEGABYTE)


def test_given_up_memory_is_the_systems_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # really MADV_FREE
    arena = Arena()
    whole, before = make(arena, 32), lazily_free()
    view = whole[:4]
    del whole
    assert lazily_free() == before
    del view
    assert lazily_free() - before == pytest.approx(32 * MEGABYTE, abs=MEGABYTE)


def test_what_was_given_back_leaves_the_process_with_the_last_tensor() -> None:
    arena, empty = Arena(), own_bytes()
    one, other = make(arena, 32), make(arena, 32, 2.0)
    del other
    arena.give_back()
    assert bool((one == 1.0).all())
    assert own_bytes() - empty == pytest.approx(32 * MEGABYTE, abs=4 * MEGABYTE)
    del one
    assert own_bytes() - empty == pytest.approx(0, abs=4 * MEGABYTE)


def test_tensors_end_in_any_thread_and_in_a_garbage_collection_amid_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena()
    circle: list[Any] = [make(arena, 4)]
    circle.append(circle)
    begin = circle[0].data_ptr()
    del circle

    def collect_first(*given: Any) -> list[tuple[int, int]]:
        gc.collect()
        return address_space.without(*given)

    monkeypatch.setattr("rlinf_async.backends.reshard.reserved.without", collect_first)
    gc.disable()
    try:
        other = make(arena, 4, 2.0)
        assert bool((other == 2.0).all())
    finally:
        gc.enable()
    monkeypatch.undo()
    circle = [other, make(arena, 4)]
    del other
    circle.append(circle)
    del circle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert make(arena, 8).data_ptr() == begin


def test_without_address_space_tensors_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Arena(4 * MEGABYTE)
    tensors = [make(full, 3, value) for value in range(3)]
    assert [float(one.sum()) for one in tensors] == [0, 12 * QUARTER, 24 * QUARTER]

    def refused(*_: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("rlinf_async.backends.reshard.address_space._address_space", refused)
    assert float(make(Arena(), 3).sum()) == 12 * QUARTER
