"""A plan for a thousand ranks and a thousand tensors is made in seconds of one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from rlinf_async.parallel import (
    FSDP2,
    DistributedOptimizer,
    Strategy,
    in_rounds,
    layout,
    plan,
)
from rlinf_async.parallel.decoders import Decoder, huggingface

T = TypeVar("T")

DECODER = Decoder(
    layers=112, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=11008, vocabulary=32000
)


TIMES = 5


def measured(work: Callable[[], T], enough: float) -> tuple[T, float]:
    """What it returns, and its seconds of CPU over those of a yardstick just before or after it.

    The yardstick makes and sorts as many objects as there are moves: it too slows down with the
    machine, with neighbours that take its cache, and with memory that a process touches first.
    Where these come and go in between they make the work look slow, never fast: the least of
    several measures counts, and one that is ``enough`` is the last.
    """
    ratios: list[float] = []
    while True:
        yard = yardstick()
        begin = time.process_time()
        made = work()
        seconds = time.process_time() - begin
        ratios.append(seconds / max(yard, yardstick()))
        if ratios[-1] < enough or len(ratios) == TIMES:
            return made, min(ratios)


def yardstick() -> float:
    begin = time.process_time()
    sorted({(at * 7919 % 1_000_003, str(at)) for at in range(300_000)})
    return time.process_time() - begin


def sharded(**sizes: int) -> Strategy:
    return Strategy(**sizes, sharding=FSDP2())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (sharded(dp=1024), sharded(dp=512)),
        (Strategy(dp=16, tp=8, pp=8), Strategy(dp=64, tp=4, pp=4)),
        (sharded(dp=16, tp=8, pp=8), sharded(dp=64, tp=4, pp=4)),
        (
            Strategy(dp=16, tp=8, pp=8, sharding=DistributedOptimizer()),
            Strategy(dp=64, tp=4, pp=4, sharding=DistributedOptimizer()),
        ),
        (Strategy(dp=16, tp=8, pp=8), sharded(dp=1024)),
        (sharded(dp=1024), sharded(dp=16, tp=8, pp=8)),
    ],
    ids=[
        "fsdp",
        "model-parallel",
        "model-parallel-fsdp",
        "distributed-optimizer",
        "replicas-to-fsdp",
        "fsdp-to-model-parallel-fsdp",
    ],
)
def test_a_thousand_ranks_and_tensors_are_planned_in_seconds_of_cpu(
    old: Strategy, new: Strategy
) -> None:
    model = huggingface(DECODER)
    assert len(model.parameters) > 1000
    before, after = layout(model, old), layout(model, new)
    made, ratio = measured(lambda: plan(before, after), enough=8)
    sent = made.sent()
    assert sum(sent.values()) == sum(made.received().values()) > 0
    assert ratio < 8  # twice as much at most, on an idle core


def test_a_million_moves_are_put_in_rounds_in_seconds_of_cpu() -> None:
    model = huggingface(DECODER)
    made = plan(layout(model, sharded(dp=1024)), layout(model, sharded(dp=512)))
    rounds, ratio = measured(lambda: in_rounds(made, 8 << 20), enough=5)
    assert len(rounds.bytes) >= len(made.bytes) > 1_000_000
    assert ratio < 5
