"""A live rescale of a model and its Adam state, dp 2 -> 4 -> 2: one line of JSON.

With ``--memory``: how far the memory of all ranks together rises above old and new shards, by rank.
It is read from ``/proc/PID/smaps_rollup`` (proportional set size) while they move, which slows them
down, so times are measured in another run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.ranks import (
    BlocksManager,
    arguments,
    results,
    start,
    timed_together,
)

LAUNCHED = 4
ENOUGH = 5
"""samples of one rescale; with fewer, its highest memory was hardly among them"""


def rescale(rank: int, ranks: int, parameters: float, watched: Path | None) -> dict[str, Any]:
    """One rank: go to two ranks, take a step, then 2 -> 4 -> 2.

    ``watched``: where to ask for a look at the memory before each rescale.
    """
    manager = BlocksManager(parameters, ranks, rank)
    manager.rescale(2)
    if manager.active:
        manager.take_a_step()
    before = manager.fingerprint() if manager.active else ""
    found: dict[str, Any] = {"bytes": 0}
    for size in (4, 2):
        dist.barrier()
        if watched is not None:
            ctypes.CDLL(None).malloc_trim(0)  # what was freed is not to pay for what comes
            dist.barrier()
            if rank == 0:
                (watched / f"still_{size}").touch()
                while not (watched / f"seen_{size}").exists():
                    time.sleep(0.01)
            dist.barrier()
        begin = time.monotonic()
        with timed_together() as seconds:
            report = manager.rescale(size)
        found[f"to_{size}"] = seconds[0]
        found[f"window_{size}"] = [begin, time.monotonic()]
        found[f"buckets_{size}"] = report.peak_bytes
        found["bytes"] += report.sent_bytes
        found[f"held_{size}"] = manager.held_bytes() if manager.active else 0
    if manager.active and manager.fingerprint() != before:
        raise SystemExit(f"rank {rank} does not hold what it had")
    return found


def memory_of(processes: list[int]) -> int:
    """Bytes of all of them, shared pages counted once."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(
                int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")
            )
    return total * 1024


def main() -> None:
    asked = arguments("dp 2 -> 4 -> 2, live")
    watched = asked.folder if asked.memory else None
    context = start(rescale, LAUNCHED, asked.folder, asked.parameters, watched)
    samples: list[tuple[float, int]] = []
    before: dict[int, int] = {}
    while not context.join(0.02 if watched else None):
        if watched is None:
            continue
        running = [one.pid for one in context.processes if one.pid is not None]
        samples.append((time.monotonic(), memory_of(running)))
        for size in (4, 2):
            if size not in before and (watched / f"still_{size}").exists():
                before[size] = memory_of(running)
                (watched / f"seen_{size}").touch()
    found = results(rescale, LAUNCHED, asked.folder)
    line: dict[str, float] = {
        "seconds": found[0]["to_4"] + found[0]["to_2"],
        "seconds_2_to_4": found[0]["to_4"],
        "seconds_4_to_2": found[0]["to_2"],
        "sent_bytes": sum(one["bytes"] for one in found),
    }
    for size, still in before.items():
        line[f"buckets_per_rank_to_{size}"] = beside(found, samples, size, still)
    print(json.dumps(line))


def beside(
    found: list[dict[str, Any]], samples: list[tuple[float, int]], size: int, before: int
) -> float:
    """The highest memory of a rescale less that before it and the new shards: buckets by rank."""
    begin = min(one[f"window_{size}"][0] for one in found)
    end = max(one[f"window_{size}"][1] for one in found)
    during = [amount for at, amount in samples if begin <= at <= end]
    if len(during) < ENOUGH:
        raise SystemExit(f"only {len(during)} looks at the memory in {end - begin:.1f} s")
    new: int = sum(one[f"held_{size}"] for one in found)
    return (max(during) - before - new) / LAUNCHED / DEFAULT_BUCKET_BYTES


if __name__ == "__main__":
    main()
