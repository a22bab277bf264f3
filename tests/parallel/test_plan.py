"""What every plan promises, for random models and pairs of strategies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlinf_async.parallel import (
    FSDP1,
    FSDP2,
    Layout,
    Model,
    Plan,
    Strategy,
    in_rounds,
    layout,
    plan,
)
from tests.parallel.arrays import Buffers, gather, reshard, scatter, view
from tests.parallel.models import (
    demands,
    examples,
    fitting,
    least_possible_maximum,
    model,
    models,
    sizes,
    strategies,
    values,
)


@st.composite
def pairs(draw: st.DrawFn, most: int = 12) -> tuple[Model, Layout, Layout]:
    """One set of global tensors, held in two ways: other strategies, and fused or not."""
    arguments = draw(sizes)
    one = model(arguments, draw(st.booleans()))
    other = model(arguments, draw(st.booleans()))
    before, after = draw(strategies(most)), draw(strategies(most))
    assume(fitting(one, before) and fitting(other, after))
    return one, layout(one, before), layout(other, after)


def equal(one: Buffers, other: Buffers) -> bool:
    return one.keys() == other.keys() and all(
        held.keys() == other[rank].keys()
        and all(np.array_equal(array, other[rank][name]) for name, array in held.items())
        for rank, held in one.items()
    )


@examples(60)
@given(pairs())
def test_a_plan_gives_what_the_new_layout_says_and_the_plan_back_gives_the_old(
    pair: tuple[Model, Layout, Layout],
) -> None:
    one, old, new = pair
    whole = values(one)
    before, after = scatter(old, whole), scatter(new, whole)
    assert equal(reshard(plan(old, new), before), after)
    assert equal(reshard(plan(new, old), after), before)
    back = gather(old, before)
    assert all(np.array_equal(back[name], whole[name]) for name in whole)


@examples(40)
@given(pairs())
def test_every_element_of_the_new_layout_is_written_exactly_once(
    pair: tuple[Model, Layout, Layout],
) -> None:
    _, old, new = pair
    made = plan(old, new)
    for rank in new.ranks:
        mine = made.of_rank(rank)
        for buffer in new.of_rank(rank):
            written = np.zeros(buffer.shape, np.int64)
            for run in (*mine.copies, *mine.receives):
                if run.target.buffer == buffer.name:
                    view(written, run.target)[...] += 1
            wanted = np.zeros(buffer.shape, np.int64).reshape(-1)
            for piece in buffer.pieces:
                wanted[piece.offset : piece.offset + int(np.prod(piece.size))] += 1
            assert np.array_equal(written, wanted.reshape(buffer.shape)), (rank, buffer.name)


@examples(40)
@given(pairs())
def test_sources_hold_what_they_send_and_both_sides_agree_on_every_run(
    pair: tuple[Model, Layout, Layout],
) -> None:
    _, old, new = pair
    made = plan(old, new)
    sent = [run for rank in {*old.ranks, *new.ranks} for run in made.of_rank(rank).sends]
    received = [run for rank in {*old.ranks, *new.ranks} for run in made.of_rank(rank).receives]
    assert Counter(sent) == Counter(received)
    for rank in old.ranks:
        mine = made.of_rank(rank)
        held = {buffer.name: buffer for buffer in old.of_rank(rank)}
        for peer in {run.target_rank for run in mine.sends}:
            theirs = made.of_rank(peer).receives
            assert [run for run in mine.sends if run.target_rank == peer] == [
                run for run in theirs if run.source_rank == rank
            ]
        for run in (*mine.sends, *mine.copies):
            covered = np.zeros(held[run.source.buffer].shape, bool).reshape(-1)
            for piece in held[run.source.buffer].pieces:
                if piece.tensor in run.tensors:
                    covered[piece.offset : piece.offset + int(np.prod(piece.size))] = True
            assert view(covered, run.source).all()


@examples(25)
@given(pairs(most=7))
def test_only_what_a_rank_lacks_is_sent_to_it_and_by_levelled_senders(
    pair: tuple[Model, Layout, Layout],
) -> None:
    _, old, new = pair
    made = plan(old, new)
    assert sum(made.received().values()) == sum(demands(made).values())
    # One row of a box at each end of what a rank sends to a pool may be too much.
    row = 4 * 8
    assert max(made.sent().values(), default=0) <= 1.1 * least_possible_maximum(made) + 2 * row


@examples(25)
@given(models(), strategies())
def test_nothing_is_sent_when_the_layout_stays(one: Model, strategy: Strategy) -> None:
    assume(fitting(one, strategy))
    made = plan(layout(one, strategy), layout(one, strategy))
    assert made.is_local.all()


@examples(25)
@given(pairs())
def test_the_plan_is_the_same_wherever_it_is_made(pair: tuple[Model, Layout, Layout]) -> None:
    _, old, new = pair
    first, second = plan(old, new), plan(old, new)
    assert all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("from_rank", "to_rank", "source_piece", "target_piece")
    )
    assert np.array_equal(first.boxes.start, second.boxes.start)


def test_neighbours_that_are_contiguous_on_both_sides_are_one_run() -> None:
    one = Model.of({f"w{index}": (4, 4) for index in range(10)})
    made = plan(
        layout(one, Strategy(dp=2, sharding=FSDP1())), layout(one, Strategy(sharding=FSDP1()))
    )
    [copied] = made.of_rank(0).copies
    [received] = made.of_rank(0).receives
    assert copied.elements == received.elements == 80
    assert copied.tensors == ("w0", "w1", "w2", "w3", "w4")


def replicated_then_sharded() -> Plan:
    one = Model.of({"w": (64, 8)})
    old = layout(one, Strategy(dp=4))
    return plan(old, layout(one, Strategy(dp=2, sharding=FSDP2()), range(4, 6)))


def test_replicas_share_the_sending() -> None:
    assert replicated_then_sharded().sent() == dict.fromkeys(range(4), 64 * 8)


@pytest.mark.parametrize("dp", [1, 2, 4, 3])
def test_growing_and_shrinking_sends_only_what_changes_hands(dp: int) -> None:
    one = Model.of({"w": (12, 2)})
    old = layout(one, Strategy(dp=4, sharding=FSDP2()))
    made = plan(old, layout(one, Strategy(dp=dp, sharding=FSDP2())))
    lacking = sum(demands(made).values())
    assert sum(made.sent().values()) == lacking


@examples(40)
@given(pairs(), st.sampled_from([32, 100, 1000, 1 << 20]))
def test_in_rounds_the_same_arrives_and_no_rank_has_more_than_a_bucket_at_a_time(
    pair: tuple[Model, Layout, Layout], bucket: int
) -> None:
    one, old, new = pair
    made = in_rounds(plan(old, new), bucket)
    whole = values(one)
    assert equal(reshard(made, scatter(old, whole)), scatter(new, whole))
    for rank in {*old.ranks, *new.ranks}:
        mine = made.of_rank(rank)
        for runs in (mine.sends, mine.receives):
            assert [run.round for run in runs] == sorted(run.round for run in runs)
            for now in {run.round for run in runs}:
                # A row of a box, at most 12 elements here, is never cut.
                assert sum(run.bytes for run in runs if run.round == now) <= max(bucket, 12 * 4)


def test_rounds_are_as_few_as_the_busiest_rank_needs() -> None:
    one = Model.of({f"w{index}": (64, 4) for index in range(8)})
    made = plan(layout(one, Strategy()), layout(one, Strategy(), [1]))
    assert int(made.bytes.sum()) == 8 * 1024
    rounds = in_rounds(made, 2048).round
    assert rounds is not None
    assert rounds.max() + 1 == 4


def test_a_bucket_must_have_a_byte() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        in_rounds(replicated_then_sharded(), 0)
