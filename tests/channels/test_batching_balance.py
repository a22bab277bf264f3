"""Token-balanced partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.channels.batching import CountsDisagree, SampleTooLong
from rlinf_async.channels.batching.iterator import balance, fewest_micro_batches

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def fullest(tokens: list[int], count: int) -> int:
    return max(sum(tokens[index] for index in part) for part in balance(tokens, count))


@given(lengths, st.data())
def test_every_sample_is_in_one_part_and_no_part_is_empty(
    tokens: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(tokens)))
    parts = balance(tokens, count)
    assert len(parts) == count
    assert all(parts)
    assert all(part == sorted(part) for part in parts)
    assert sorted(index for part in parts for index in part) == list(range(len(tokens)))


@given(lengths)
def test_one_part_more_never_makes_the_fullest_part_fuller(tokens: list[int]) -> None:
    loads = [fullest(tokens, count) for count in range(1, len(tokens) + 1)]
    assert loads == sorted(loads, reverse=True)


@given(lengths, st.integers(50, 200))
def test_the_count_is_the_smallest_that_keeps_to_the_limit(tokens: list[int], limit: int) -> None:
    count = fewest_micro_batches(tokens, limit)
    assert fullest(tokens, count) <= limit
    assert count == 1 or fullest(tokens, count - 1) > limit


@given(st.lists(st.integers(1, 50), min_size=4, max_size=40))
def test_loads_differ_by_no_more_than_the_longest_sample(tokens: list[int]) -> None:
    loads = [sum(tokens[index] for index in part) for part in balance(tokens, 4)]
    assert max(loads) - min(loads) <= max(tokens)


def test_a_sample_over_the_limit_is_named() -> None:
    with pytest.raises(SampleTooLong, match="sample 1 of the window has 30 tokens, over the 20"):
        fewest_micro_batches([5, 30, 7], 20)


@pytest.mark.parametrize("count", [0, 4])
def test_more_parts_than_samples_are_refused(count: int) -> None:
    with pytest.raises(CountsDisagree, match=f"3 samples cannot make {count} micro-batches"):
        balance([1, 2, 3], count)
