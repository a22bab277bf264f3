"""Seconds to plan between layouts of 1,024 ranks and 1,011 tensors, and to number the rounds of the
plan with the most moves: one line of JSON.

A plan is made by one core; its seconds are counted, not those in which others had it.
"""

from __future__ import annotations

import json
import time

from rlinf_async.parallel import (
    FSDP2,
    DistributedOptimizer,
    Plan,
    Sharding,
    Strategy,
    in_rounds,
    layout,
    plan,
)
from rlinf_async.parallel.decoders import DecoderSizes, huggingface

DECODER = DecoderSizes(
    layers=112, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=11008, vocabulary=32000
)
TIMES = 3
BUCKET_BYTES = 8 << 20


def sharded(sharding: Sharding, dp: int, tp: int = 1, pp: int = 1) -> Strategy:
    return Strategy(dp=dp, tp=tp, pp=pp, sharding=sharding)


REPLICAS = Strategy(dp=16, tp=8, pp=8)
PAIRS = {
    "fsdp_1024_to_512": (sharded(FSDP2(), 1024), sharded(FSDP2(), 512)),
    "fsdp_1024_to_768": (sharded(FSDP2(), 1024), sharded(FSDP2(), 768)),
    "replicas_to_replicas": (REPLICAS, Strategy(dp=64, tp=4, pp=4)),
    "replicas_to_fsdp": (REPLICAS, sharded(FSDP2(), 1024)),
    "tp_pp_fsdp_to_fsdp": (sharded(FSDP2(), 16, 8, 8), sharded(FSDP2(), 1024)),
    "fsdp_to_tp_pp_fsdp": (sharded(FSDP2(), 1024), sharded(FSDP2(), 16, 8, 8)),
    "optimizer_shards": (
        sharded(DistributedOptimizer(), 16, 8, 8),
        sharded(DistributedOptimizer(), 64, 4, 4),
    ),
}


def main() -> None:
    model = huggingface(DECODER)
    seconds: dict[str, float] = {}
    largest: Plan | None = None
    for name, (old, new) in PAIRS.items():
        before, after = layout(model, old), layout(model, new)
        taken = []
        while True:
            begin = time.process_time()
            made = plan(before, after)
            taken.append(time.process_time() - begin)
            if len(taken) == TIMES:
                break
        if largest is None or len(made.bytes) > len(largest.bytes):
            largest = made
        seconds[name] = sorted(taken)[TIMES // 2]
    assert largest is not None
    begin = time.process_time()
    in_rounds(largest, BUCKET_BYTES)
    rounds = time.process_time() - begin
    found = {"slowest_seconds": max(seconds.values()), "most_moves": len(largest.bytes)}
    print(json.dumps({**found, "rounds_seconds": rounds, **seconds}))


if __name__ == "__main__":
    main()
