"""What the machine's memory takes of a live rescale: one line of JSON.

The same ranks make room for the same new shards as dp 2 -> 4 -> 2, and write a byte of each page;
then the old ones go. Nothing is moved; what a rank keeps lies where it was. A live rescale beside
it, in processes of the same minute, says how much more than that it takes.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.fsdp.sharding import sharded_over
from rlinf_async.backends.fsdp.state import Shards
from rlinf_async.backends.reshard import Reservations, allocate
from rlinf_async.parallel import Model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.live import LAUNCHED, SIZES, rescale
from benchmarks.reshard.ranks import STATES, Blocks, arguments, in_ranks, timed_together

CPU = torch.device("cpu")


def touch(rank: int, ranks: int, parameters: float) -> dict[str, Any]:
    """One rank: room for the shards of two ranks, then 2 -> 4 -> 2."""
    with torch.device("meta"):
        blocks = Blocks(parameters)
    model = Model.of({name: one.shape for name, one in blocks.named_parameters()})
    reserved = Reservations()
    held: list[Shards] = [{} for _ in range(STATES)]
    _touch_next(model, rank, SIZES[-1], reserved, held)
    found: dict[str, Any] = {"bytes": 0}
    for size in SIZES:
        with timed_together() as seconds:
            found["bytes"] += _touch_next(model, rank, size, reserved, held)
            reserved.mark_free()
        found[f"to_{size}"] = seconds[0]
    return found


def _touch_next(
    model: Model, rank: int, ranks: int, reserved: Reservations, held: list[Shards]
) -> int:
    """Weights and moments of a rank of so many, each page of them touched, instead of the old ones.

    Returns the bytes that were not there before.
    """
    part = sharded_over(model, ranks)
    old = list(held)
    for kind, before in enumerate(old):
        held[kind] = allocate(
            part, rank, device=CPU, reserved=reserved, kind=str(kind), held=before
        )
        for one in held[kind].values():
            one.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE] = 0
    pairs = [
        (one, before.get(name))
        for new, before in zip(held, old, strict=True)
        for name, one in new.items()
    ]
    return sum(one.nbytes - _shared(one, before) for one, before in pairs)


def _shared(one: Tensor, other: Tensor | None) -> int:
    """Bytes that two tensors have in common."""
    if other is None:
        return 0
    low = max(one.data_ptr(), other.data_ptr())
    return max(0, min(one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes) - low)


def main() -> None:
    asked = arguments("room for the new shards of dp 2 -> 4 -> 2, touched")
    touched = in_ranks(touch, LAUNCHED, asked.folder, asked.parameters)
    live = in_ranks(rescale, LAUNCHED, asked.folder, asked.parameters, None)[0]
    seconds = touched[0]["to_4"] + touched[0]["to_2"]
    live_seconds = live["to_4"] + live["to_2"]
    line: dict[str, float] = {
        "seconds": seconds,
        "seconds_2_to_4": touched[0]["to_4"],
        "seconds_4_to_2": touched[0]["to_2"],
        "touched_bytes": sum(one["bytes"] for one in touched),
        "live_seconds": live_seconds,
        "live_over_touch": live_seconds / seconds,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
