"""Planning is vectorised: many times as many moves take hardly more calls of functions.

How many seconds a plan of a thousand ranks takes is measured by ``rlinf-async bench reshard``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeVar

import pytest
from msgspec import structs

from rlinf_async.parallel import (
    FSDP2,
    DistributedOptimizer,
    Layout,
    Sharding,
    Strategy,
    in_rounds,
    layout,
    plan,
)
from rlinf_async.parallel.decoders import DecoderSizes, huggingface

T = TypeVar("T")
Pair = tuple[Strategy, Strategy]


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and how many functions it called, those written in C included."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        made = work()
    finally:
        sys.setprofile(None)
    return made, calls


def sharded(dp: int, tp: int = 1, pp: int = 1) -> Strategy:
    return Strategy(dp=dp, tp=tp, pp=pp, sharding=FSDP2())


def model_parallel(times: int, sharding: Sharding | None = None) -> Pair:
    old, new = Strategy(dp=2 * times, tp=4, pp=2), Strategy(dp=4 * times, tp=2, pp=2)
    if sharding is None:
        return old, new
    return structs.replace(old, sharding=sharding), structs.replace(new, sharding=sharding)


PAIRS: dict[str, Callable[[int], Pair]] = {
    "fsdp": lambda times: (sharded(16 * times), sharded(8 * times)),
    "model-parallel": model_parallel,
    "model-parallel-fsdp": lambda times: model_parallel(times, FSDP2()),
    "distributed-optimizer": lambda times: model_parallel(times, DistributedOptimizer()),
    "replicas-to-fsdp": lambda times: (model_parallel(times)[0], sharded(16 * times)),
    "fsdp-to-model-parallel-fsdp": lambda times: (
        sharded(16 * times),
        model_parallel(times, FSDP2())[0],
    ),
}


def layouts(pair: str, times: int) -> tuple[Layout, Layout]:
    """A model on so many times as many ranks."""
    decoder = DecoderSizes(
        layers=8, hidden=512, heads=32, kv_heads=8, head_dim=16, mlp=1024, vocabulary=16000
    )
    old, new = PAIRS[pair](times)
    return layout(huggingface(decoder), old), layout(huggingface(decoder), new)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_calls_that_make_a_plan_hardly_grow_with_its_moves(pair: str) -> None:
    small, few = counted(partial(plan, *layouts(pair, 1)))
    large, many = counted(partial(plan, *layouts(pair, 8)))
    assert len(large.bytes) >= 2 * len(small.bytes)
    assert many < 2 * few


@pytest.mark.parametrize("pair", PAIRS)
def test_the_calls_that_number_the_rounds_depend_on_rounds_and_not_on_moves(pair: str) -> None:
    for times in (1, 8):
        made = plan(*layouts(pair, times))
        rounds, calls = counted(partial(in_rounds, made, 1 << 18))
        assert rounds.round is not None
        assert calls < 1000 * (int(rounds.round.max()) + 1)
