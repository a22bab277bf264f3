"""A live rescale of a model and its Adam state, dp 2 -> 4 -> 2: one line of JSON.

With ``--memory``: how far the memory of all ranks together rises above old and new shards (what
stays in its place counted once), by rank.
It is read from ``/proc/PID/smaps_rollup`` (proportional set size) while they move, which slows them
down, so times are measured in another run.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext

from rlinf_async.backends.fsdp.rescale import rescale as rescale_model
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES
from rlinf_async.parallel import Strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.ranks import (
    BlocksManager,
    arguments,
    results,
    start,
    timed_together,
)

LAUNCHED = 4
SIZES = (4, 2)
SIGNS = {"Pss_Anon": 1, "Pss_Shmem": 1, "LazyFree": -1}
"""lines of ``smaps_rollup`` that count"""
ENOUGH = 5
"""looks at the memory during a rescale; with fewer, its highest was hardly among them"""


def rescale(rank: int, ranks: int, parameters: float, watched: Path | None) -> dict[str, Any]:
    """One rank: go to two ranks, take a step, then 2 -> 4 -> 2, until enough was seen of it.

    ``watched``: the folder in which `Watcher` says what it has seen.
    """
    manager = BlocksManager(parameters, ranks, rank)
    rescale_model(manager, Strategy(dp=2))
    if manager.active:
        manager.take_a_step()
    before = manager.fingerprint() if manager.active else ""
    found: dict[str, Any] = {}
    for turn in itertools.count():
        found["bytes"] = 0
        for size in SIZES:
            dist.barrier()
            if watched is not None:
                ctypes.CDLL(None).malloc_trim(0)  # what was freed is not to pay for what comes
                _meet(rank, watched, f"still_{turn}_{size}", f"seen_{turn}_{size}")
            with timed_together() as seconds:
                report = rescale_model(manager, Strategy(dp=size))
            found[f"to_{size}"] = seconds[0]
            found["bytes"] += report.sent_bytes
            new = manager.held_bytes() if manager.active else 0
            found[f"new_{size}"] = new - report.kept_bytes
            if watched is not None:
                _meet(rank, watched, f"moved_{turn}_{size}", f"watched_{turn}_{size}")
        if watched is None or (watched / "enough").exists():
            break
    if manager.active and manager.fingerprint() != before:
        raise SystemExit(f"rank {rank} does not hold what it had")
    return found


def _meet(rank: int, watched: Path, says: str, awaits: str) -> None:
    """All ranks have come here, and the watcher has seen that."""
    dist.barrier()
    if rank == 0:
        (watched / says).touch()
        while not (watched / awaits).exists():
            time.sleep(0.01)
    dist.barrier()


class Watcher:
    """Looks at the memory of ranks that move; they move again until it has seen enough."""

    def __init__(self, folder: Path, context: ProcessContext) -> None:
        self._folder = folder
        self._context = context
        self.highest: dict[int, int] = dict.fromkeys(SIZES, 0)
        """bytes above what there was before, by the size gone to"""
        self._looks: dict[int, int] = dict.fromkeys(SIZES, 0)

    def watch(self) -> None:
        """Until there were `ENOUGH` looks at a rescale to each size."""
        for turn in itertools.count():
            for size in SIZES:
                self._one(turn, size)
            if min(self._looks.values()) >= ENOUGH:
                return

    def _one(self, turn: int, size: int) -> None:
        while not self._said(f"still_{turn}_{size}"):
            self._context.join(0.01)
        before = self._memory()
        (self._folder / f"seen_{turn}_{size}").touch()
        while not self._said(f"moved_{turn}_{size}"):
            self.highest[size] = max(self.highest[size], self._memory() - before)
            self._looks[size] += 1
            self._context.join(0.02)
        if min(self._looks.values()) >= ENOUGH:
            (self._folder / "enough").touch()
        (self._folder / f"watched_{turn}_{size}").touch()

    def _said(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _memory(self) -> int:
        """Bytes that the ranks themselves have filled, shared pages counted once.

        Not those of files: a library's pages count for less while others on the machine use it. Nor
        what they have given up, which the system has yet to take.
        """
        total = 0
        for process in self._context.processes:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                for line in text.splitlines():
                    name, _, rest = line.partition(":")
                    if name in SIGNS:
                        total += SIGNS[name] * int(rest.split()[0])
        return total * 1024


def main() -> None:
    asked = arguments("dp 2 -> 4 -> 2, live")
    watched = asked.folder if asked.memory else None
    context = start(rescale, LAUNCHED, asked.folder, asked.parameters, watched)
    watcher = Watcher(asked.folder, context)
    if asked.memory:
        watcher.watch()
    while not context.join():
        continue
    found = results(rescale, LAUNCHED, asked.folder)
    line: dict[str, float] = {
        "seconds": found[0]["to_4"] + found[0]["to_2"],
        "seconds_2_to_4": found[0]["to_4"],
        "seconds_4_to_2": found[0]["to_2"],
        "sent_bytes": sum(one["bytes"] for one in found),
    }
    if asked.memory:
        for size, highest in watcher.highest.items():
            new = sum(one[f"new_{size}"] for one in found)
            line[f"buckets_per_rank_to_{size}"] = (highest - new) / LAUNCHED / DEFAULT_BUCKET_BYTES
    print(json.dumps(line))


if __name__ == "__main__":
    main()
