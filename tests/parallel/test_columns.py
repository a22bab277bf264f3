"""Orders of rows, by whichever way they are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.parallel.regions import Ints, distinct, ordered_by
from tests.parallel.models import examples

EXTENTS = st.sampled_from([1, 2, 5, 1 << 15, 1 << 20, 1 << 40, 1 << 61])


@st.composite
def columns(draw: st.DrawFn) -> list[Ints]:
    rows = draw(st.integers(0, 30))
    made: list[Ints] = []
    for extent in draw(st.lists(EXTENTS, min_size=1, max_size=5)):
        # A few values, large ones among them, so that rows are equal in some columns.
        few = st.sampled_from([0, extent // 3, extent // 2, extent - 1])
        column = np.array(draw(st.lists(few, min_size=rows, max_size=rows)), np.int64)
        made.append(np.sort(column) if draw(st.booleans()) else column)
    return made


@examples(200)
@given(columns())
def test_rows_are_ordered_by_the_first_column_then_the_next_and_else_stay(keys: list[Ints]) -> None:
    assert np.array_equal(ordered_by(keys), np.lexsort(keys[::-1]))


@pytest.mark.parametrize("extent", [1, 300, 1 << 16, (1 << 16) + 1, 1 << 32, 1 << 40, 1 << 62])
def test_each_of_many_numbers_is_kept_once_in_order(extent: int) -> None:
    keys = np.random.default_rng(extent % 97).integers(0, extent, 5000)
    keys[2500:] = keys[:2500]
    assert np.array_equal(distinct(keys), np.unique(keys))
    assert np.array_equal(distinct(keys[:0]), keys[:0])
