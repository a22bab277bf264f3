"""Which parts of memory are free: never two for one part, and none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels.wire.pool import FreeList

SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=40)


@given(SIZES)
def test_parts_that_are_taken_never_overlap_and_all_of_it_comes_back(
    steps: list[tuple[int, int]],
) -> None:
    free = FreeList(10, 110)
    taken: list[tuple[int, int]] = []
    for size, give in steps:
        start = free.take(size)
        if start is not None:
            assert 10 <= start <= 110 - size
            assert all(start >= other + n or other >= start + size for other, n in taken)
            taken.append((start, size))
        if taken and give < len(taken):
            free.give(*taken.pop(give))
    for start, size in taken:
        free.give(start, size)
    assert free.idle
    assert free.take(100) == 10


def test_the_lowest_part_is_used_again_first() -> None:
    free = FreeList(0, 100)
    assert [free.take(10), free.take(10), free.take(10)] == [0, 10, 20]
    free.give(0, 10)
    assert free.take(5) == 0
    assert not free.idle


@pytest.mark.parametrize(("start", "size"), [(0, 10), (45, 10), (95, 10), (20, 0), (5, 20)])
def test_what_was_not_taken_cannot_be_given(start: int, size: int) -> None:
    free = FreeList(10, 100)
    assert free.take(40) == 10
    with pytest.raises(ValueError, match="were not taken"):
        free.give(start, size)
