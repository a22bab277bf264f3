"""The whole product of tensor, stage and data ranks, tied embeddings and not: who holds what, and
every way from one strategy to another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlinf_async.parallel import (
    DistributedOptimizer,
    Layout,
    Piece,
    Replicated,
    Sharding,
    Strategy,
    layout,
    plan,
)
from rlinf_async.parallel.decoders import DecoderSizes, megatron
from tests.parallel.arrays import Buffers, reshard, scatter
from tests.parallel.test_decoders import config, whole_values

SIZES = tuple(itertools.product((1, 2), repeat=3))
"""tp, pp, dp"""
SHARDINGS: dict[str, Sharding] = {
    "distributed": DistributedOptimizer(),
    "in small buckets": DistributedOptimizer(bucket_elements=100),
    "copies": Replicated(),
}


def decoder(*, tied: bool) -> DecoderSizes:
    return DecoderSizes.from_config(config("qwen3", tie_word_embeddings=tied))


def layouts(sharding: Sharding, *, tied: bool) -> dict[tuple[int, ...], Layout]:
    made = megatron(decoder(tied=tied), vocabulary_multiple=1)
    return {
        (tp, pp, dp): layout(made, Strategy(tp=tp, pp=pp, dp=dp, sharding=sharding))
        for tp, pp, dp in SIZES
    }


def embedding(of: Layout, rank: int) -> list[Piece]:
    """What a rank's shard has of the embedding; offsets count from the first of it."""
    pieces = [piece for buffer in of.of_rank(rank) for piece in buffer.pieces]
    found = [one for one in pieces if one.tensor == "model.embed_tokens.weight"]
    first = min((one.offset for one in found), default=0)
    return [one._replace(offset=one.offset - first) for one in found]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("tp", "pp", "dp"), [one for one in SIZES if one[1] == 2])
def test_data_ranks_of_the_first_and_the_last_stage_have_the_same_part_of_a_tied_embedding(
    tp: int, pp: int, dp: int, sharding: str
) -> None:
    # Megatron adds up the gradients of both copies after data ranks have got their parts.
    found = layouts(SHARDINGS[sharding], tied=True)[tp, pp, dp]
    for rank in range(tp * dp):
        assert embedding(found, rank) == embedding(found, tp * dp + rank) != []


def same(one: Buffers, other: Buffers) -> bool:
    return one.keys() == other.keys() and all(
        held.keys() == other[rank].keys()
        and all(np.array_equal(array, other[rank][name]) for name, array in held.items())
        for rank, held in one.items()
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_strategy_becomes_every_other(sharding: str, tied: bool) -> None:
    whole = whole_values(decoder(tied=tied))
    found = layouts(SHARDINGS[sharding], tied=tied)
    filled = {sizes: scatter(one, whole) for sizes, one in found.items()}
    for old, new in itertools.product(SIZES, repeat=2):
        assert same(reshard(plan(found[old], found[new]), filled[old]), filled[new]), (old, new)
