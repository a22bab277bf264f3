"""One rank sends shards to another: bytes/s beside a memcpy of both at once. One line of JSON.

Each has a core of its own. The receiver's shards are new memory each time, as in a rescale; the
memcpy is between arrays that were touched before.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rlinf_async.backends.reshard import BufferState, Reservations, allocate, reshard
from rlinf_async.parallel import Model, Strategy, layout, plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.ranks import STATES, arguments, in_ranks, own_core, timed_together

TIMES = 9
CPU = torch.device("cpu")


def exchange(rank: int, ranks: int, parameters: float) -> dict[str, Any]:
    """One rank of the two."""
    own_core(rank)
    count = max(1, round(parameters / STATES / 2**22))
    model = Model.of({f"weight_{index}": (1024, 4096) for index in range(count)})
    old, new = layout(model, Strategy(), [0]), layout(model, Strategy(), [1])
    made = plan(old, new)
    held = [allocate(old, rank, device=CPU) for _ in range(STATES)]
    for state in held:
        for one in state.values():
            one.fill_(1.0)
    whole = count * 2**24
    source, target = (torch.ones(whole, dtype=torch.uint8) for _ in range(2))
    moved, copied, worked = [], [], []
    for _ in range(TIMES):
        with timed_together() as seconds:
            target.copy_(source)
        copied.append(whole / seconds[0])
        begin = time.process_time()
        with timed_together() as seconds:
            rooms = (allocate(new, rank, device=CPU, reserved=Reservations()) for _ in held)
            states = [BufferState(*pair) for pair in zip(held, rooms, strict=True)]
            reshard((made, states), device=CPU)
        worked.append(STATES * whole / (time.process_time() - begin))
        moved.append(STATES * whole / seconds[0])
        del states
    return {
        "bytes_per_second": statistics.median(moved),
        "memcpy_bytes_per_second": statistics.median(copied),
        "bytes_per_core_second": statistics.median(worked),
        "best_bytes_per_second": max(moved),
        "best_memcpy_bytes_per_second": max(copied),
    }


def main() -> None:
    asked = arguments("one rank sends, one receives")
    sender, receiver = in_ranks(exchange, 2, asked.folder, asked.parameters)
    slower = min(sender["bytes_per_core_second"], receiver["bytes_per_core_second"])
    print(json.dumps(sender | {"bytes_per_core_second": slower}))


if __name__ == "__main__":
    main()
