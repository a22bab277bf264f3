"""Data-parallel ranks make equally many micro-batches, and the same gradients as one rank would."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Receiver
from rlinf_async.channels.batching import BatchResizingIterator, StructOps, alone
from tests.channels.batching_kit import OPS, MaxOverRanks, Samples, cut, filled, flat, places

Floats = NDArray[np.float64]


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 8), places, st.data())
def test_token_balanced_ranks_agree_on_the_number_of_micro_batches(
    ranks: int, windows: int, window: int, arrival: list[int], data: st.DataObject
) -> None:
    size = windows * window
    lengths = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    samples = [data.draw(lengths) for _ in range(ranks)]

    async def main() -> list[list[Samples]]:
        agree = MaxOverRanks(ranks)

        async def one_rank(rank: int) -> list[Samples]:
            batches = BatchResizingIterator(
                filled(cut(samples[rank], [place * rank for place in arrival])),
                OPS,
                total_batch_size=size,
                max_tokens_per_micro_batch=30,
                balance_window=window,
                agree=agree,
            )
            return [micro_batch async for micro_batch in batches]

        return await asyncio.gather(*(one_rank(rank) for rank in range(ranks)))

    results = asyncio.run(main())
    assert len({len(micro_batches) for micro_batches in results}) == 1
    for rank, micro_batches in enumerate(results):
        assert all(micro_batches)
        assert max(map(sum, micro_batches)) <= 30
        assert sorted(flat(micro_batches)) == sorted(samples[rank])


class Rows(msgspec.Struct):
    """Rows of a linear regression."""

    x: Floats
    """``[rows, features]``"""
    y: Floats
    tokens: list[int]

    def part(self, start: int, stop: int) -> Rows:
        return Rows(self.x[start:stop], self.y[start:stop], self.tokens[start:stop])


ROWS: StructOps[Rows] = StructOps(lengths="tokens")
ROWS_IN_A_STEP = 24


def rows_from(seed: int) -> Rows:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 9, ROWS_IN_A_STEP).tolist()
    return Rows(random.normal(size=(ROWS_IN_A_STEP, 3)), random.normal(size=ROWS_IN_A_STEP), tokens)


def normalise(batch: Rows) -> Rows:
    spread = (batch.y - batch.y.mean()) / (batch.y.std() + 1e-8)
    return Rows(batch.x, spread, batch.tokens)


def gradient(batch: Rows, weight: Floats, rows: int) -> Floats:
    """Of the squared error summed over the batch and divided by ``rows``."""
    result: Floats = 2 * batch.x.T @ (batch.x @ weight - batch.y) / rows
    return result


def arriving(batches: list[Rows]) -> Receiver[Rows]:
    channel = Channel(Rows, name="rows")
    for batch in batches:
        channel.sender.put_nowait(batch)
    channel.sender.close()
    return channel.receiver


async def pipelined_gradient(
    batches: BatchResizingIterator[Rows], weight: Floats, rows: int
) -> Floats:
    """Accumulated over the micro-batches of one global batch, as they come."""
    total = np.zeros_like(weight)
    async for micro_batch in batches.global_batch():
        total += gradient(micro_batch, weight, rows)
    return total


@pytest.mark.parametrize(
    "limits",
    [
        {"micro_batch_size": 4},
        {"max_tokens_per_micro_batch": 16},
        {"max_tokens_per_micro_batch": 16, "balance_window": 6},
    ],
    ids=["fixed", "token-balanced", "token-balanced in windows"],
)
@given(seed=st.integers(0, 2**32 - 1), arrival=places, normalised=st.booleans())
def test_pipelined_and_collected_runs_give_the_same_gradients(
    limits: dict[str, Any], seed: int, arrival: list[int], normalised: bool
) -> None:
    rows, weight = rows_from(seed), np.array([0.5, -1.0, 2.0])
    handler = normalise if normalised else None
    edges = cut(list(range(ROWS_IN_A_STEP)), arrival)

    async def pipelined() -> list[Floats]:
        batches = BatchResizingIterator(
            arriving([rows.part(part[0], part[-1] + 1) for part in edges if part]),
            ROWS,
            total_batch_size=ROWS_IN_A_STEP,
            num_global_batches=2,
            on_global_batch=handler,
            agree=alone,
            **limits,
        )
        return [await pipelined_gradient(batches, weight, 12) for _ in range(2)]

    halves = [rows.part(0, 12), rows.part(12, 24)]
    collected = [gradient(handler(half) if handler else half, weight, 12) for half in halves]
    np.testing.assert_allclose(asyncio.run(pipelined()), collected, rtol=1e-12, atol=1e-12)


def test_ranks_together_make_the_gradient_of_one_rank_with_all_the_data() -> None:
    rows, weight = rows_from(3), np.array([0.5, -1.0, 2.0])

    async def main() -> Floats:
        agree = MaxOverRanks(2)
        ranks = [
            BatchResizingIterator(
                arriving([share]),
                ROWS,
                total_batch_size=12,
                max_tokens_per_micro_batch=16,
                agree=agree,
            )
            for share in (rows.part(0, 12), rows.part(12, 24))
        ]
        both = await asyncio.gather(*(pipelined_gradient(rank, weight, 12) for rank in ranks))
        mean: Floats = np.mean(both, axis=0)
        return mean

    expected = gradient(rows, weight, ROWS_IN_A_STEP)
    np.testing.assert_allclose(asyncio.run(main()), expected, rtol=1e-12, atol=1e-12)
