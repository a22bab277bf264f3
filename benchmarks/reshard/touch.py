"""What the machine's memory takes of a live rescale: one line of JSON.

The same ranks make room for the same new shards as dp 2 -> 4 -> 2, beside the old ones, and write a
byte of each page; then the old ones go. Nothing is moved. A live rescale beside it, in processes of
the same minute, says how much more than that it takes.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_async.backends.reshard import allocate
from rlinf_async.parallel import FSDP2, Model, Strategy, layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.live import LAUNCHED, SIZES, rescale
from benchmarks.reshard.ranks import STATES, Blocks, arguments, in_ranks, timed_together

CPU = torch.device("cpu")


def touch(rank: int, ranks: int, parameters: float) -> dict[str, Any]:
    """One rank: room for the shards of two ranks, then 2 -> 4 -> 2."""
    with torch.device("meta"):
        blocks = Blocks(parameters)
    model = Model.of({name: one.shape for name, one in blocks.named_parameters()})
    held = _touched(model, rank, SIZES[-1])
    found: dict[str, Any] = {"bytes": 0}
    for size in SIZES:
        with timed_together() as seconds:
            held = _touched(model, rank, size)  # the old ones go when the new ones are there
        found[f"to_{size}"] = seconds[0]
        found["bytes"] += sum(one.nbytes for one in held)
    return found


def _touched(model: Model, rank: int, ranks: int) -> list[Tensor]:
    """Weights and moments of a rank of so many, each page of them touched."""
    part = layout(model, Strategy(dp=ranks, sharding=FSDP2()))
    new = [one for _ in range(STATES) for one in allocate(part, rank, device=CPU).values()]
    for one in new:
        one.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE] = 0
    return new


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
