"""The order in which ranks hold shards: what stays in place when their number changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.parallel import FSDP2, Layout, Model, Plan, Strategy, layout, nested_order, plan

SIZES = st.integers(1, 40)


def dealt(rows: int, ranks: int, *, nested: bool = True) -> Layout:
    """A tensor of so many rows."""
    order = nested_order(ranks) if nested else range(ranks)
    return layout(Model.of({"weight": (rows, 3)}), Strategy(dp=ranks, sharding=FSDP2()), order)


def travelling(moves: Plan) -> int:
    """Bytes that go from one rank to another."""
    return sum(moves.sent().values())


@given(st.integers(0, 2000))
def test_every_rank_is_in_it_once(ranks: int) -> None:
    assert sorted(nested_order(ranks)) == list(range(ranks))


@given(st.integers(1, 500))
def test_one_rank_more_changes_nothing_in_the_order_of_the_others(ranks: int) -> None:
    more = nested_order(ranks + 1)
    assert tuple(rank for rank in more if rank < ranks) == nested_order(ranks)


def test_orders_of_a_few_ranks() -> None:
    assert [nested_order(ranks) for ranks in (1, 2, 3, 4)] == [
        (0,),
        (0, 1),
        (0, 2, 1),
        (0, 2, 1, 3),
    ]
    assert nested_order(8) == (0, 4, 2, 6, 1, 5, 3, 7)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_where_powers_of_two_double_the_new_rows_of_a_rank_are_among_its_old_ones(
    ranks: int,
) -> None:
    old, new = dealt(64, ranks), dealt(64, 2 * ranks)
    for rank in range(ranks):
        [[had]], [[has]] = ([one.pieces for one in made.of_rank(rank)] for made in (old, new))
        assert had.start[0] <= has.start[0]
        assert has.start[0] + has.size[0] <= had.start[0] + had.size[0]
    whole = 64 * 3 * 4
    assert travelling(plan(old, new)) == travelling(plan(new, old)) == whole // 2


@given(SIZES, SIZES)
def test_no_change_moves_more_than_in_the_natural_order(old: int, new: int) -> None:
    nested, natural = (
        travelling(plan(*(dealt(old * new, ranks, nested=nested) for ranks in (old, new))))
        for nested in (True, False)
    )
    assert nested <= natural
