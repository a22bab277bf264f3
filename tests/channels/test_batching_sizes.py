"""Sizes are checked when an iterator is built, with the numbers in the message."""

from __future__ import annotations

import pytest

from rlinf_async.channels.batching import (
    BatchResizingIterator,
    BatchSizeError,
    BatchSizes,
    rank_share,
)
from tests.channels.batching_kit import OPS, channel_of


def test_a_window_is_a_micro_batch_when_its_size_is_fixed() -> None:
    sizes = BatchSizes(total_batch_size=64, num_global_batches=2, micro_batch_size=8)
    assert (sizes.global_batch_size, sizes.window_size) == (32, 8)


def test_a_window_is_the_global_batch_under_a_token_limit_unless_given() -> None:
    whole = BatchSizes(total_batch_size=64, num_global_batches=2, max_tokens_per_micro_batch=100)
    half = BatchSizes(total_batch_size=64, max_tokens_per_micro_batch=100, balance_window=16)
    assert (whole.window_size, half.window_size) == (32, 16)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"total_batch_size": 10, "num_global_batches": 3}, ["=3", "=10", "1, 2, 5, 10"]),
        ({"num_global_batches": 2, "micro_batch_size": 7}, ["=7", "of 16", "1, 2, 4, 8, 16"]),
        ({"micro_batch_size": 0}, ["micro_batch_size must be at least 1, got 0"]),
        ({"total_batch_size": -4}, ["total_batch_size must be at least 1, got -4"]),
        ({"micro_batch_size": None}, ["neither was given"]),
        ({"max_tokens_per_micro_batch": 9}, ["both were given"]),
        ({"balance_window": 4}, ["balance_window=4", "not balanced"]),
        (
            {"micro_batch_size": None, "max_tokens_per_micro_batch": 9, "balance_window": 5},
            ["balance_window=5", "of 32", "1, 2, 4, 8, 16, 32"],
        ),
        ({"total_batch_size": 720720, "micro_batch_size": 17}, ["1, 2, 3, 4, 5, 6, ..., "]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(
    sizes: dict[str, int | None], named: list[str]
) -> None:
    given: dict[str, int | None] = {"total_batch_size": 32, "micro_batch_size": 2, **sizes}
    with pytest.raises(BatchSizeError) as caught:
        BatchResizingIterator(channel_of().receiver, OPS, **given)  # type: ignore[arg-type]
    for part in named:
        assert part in str(caught.value)


def test_a_token_limit_without_agreement_over_ranks_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="agree=alone if there is one rank"):
        BatchResizingIterator(
            channel_of().receiver, OPS, total_batch_size=8, max_tokens_per_micro_batch=10
        )


def test_a_rank_gets_its_share_in_whole_groups() -> None:
    assert rank_share(512, 4, group_size=8) == 128


@pytest.mark.parametrize(("ranks", "group", "fitting"), [(3, 8, "504 would"), (0, 1, "ranks=0")])
def test_a_total_that_does_not_divide_over_ranks_and_groups_is_refused(
    ranks: int, group: int, fitting: str
) -> None:
    with pytest.raises(BatchSizeError, match=fitting):
        rank_share(512, ranks, group_size=group)
