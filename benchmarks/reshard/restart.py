"""The same as `live` by a checkpoint: save, new processes, load; 2 -> 4 -> 2 ranks.

One line of JSON. Seconds of a restart are from the start of the new processes until all ranks have
loaded: imports, connections and the building of the model are in them, as in any run that is
started again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.ranks import BlocksManager, arguments, in_ranks, timed_together


def begin(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run before the first restart."""
    manager = BlocksManager(parameters, ranks, rank)
    manager.take_a_step()
    return {"fingerprint": manager.fingerprint(), **saved(manager, folder / "first")}


def grow(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run after the first restart, which saves for the second."""
    found = loaded(BlocksManager(parameters, ranks, rank), folder / "first")
    return {"loaded": found[1], **saved(found[0], folder / "second")}


def shrink(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run after the second."""
    manager, at = loaded(BlocksManager(parameters, ranks, rank), folder / "second")
    return {"loaded": at, "fingerprint": manager.fingerprint()}


def saved(manager: BlocksManager, path: Path) -> dict[str, float]:
    with timed_together() as seconds:
        manager.save_checkpoint(path)
    return {"saved": seconds[0]}


def loaded(manager: BlocksManager, path: Path) -> tuple[BlocksManager, float]:
    manager.load_checkpoint(path)
    dist.barrier()
    return manager, time.monotonic()


def main() -> None:
    asked = arguments("dp 2 -> 4 -> 2, by a checkpoint")
    folder, given = asked.folder, (asked.parameters, asked.folder)
    first = in_ranks(begin, 2, folder, *given)
    starts = [time.monotonic()]
    second = in_ranks(grow, 4, folder, *given, method="spawn")
    starts.append(time.monotonic())
    third = in_ranks(shrink, 2, folder, *given, method="spawn")
    if [one["fingerprint"] for one in first] != [one["fingerprint"] for one in third]:
        raise SystemExit("what was loaded is not what was saved")
    save = first[0]["saved"] + second[0]["saved"]
    restart = second[0]["loaded"] - starts[0] + third[0]["loaded"] - starts[1]
    print(json.dumps({"seconds": save + restart, "save_seconds": save, "load_seconds": restart}))


if __name__ == "__main__":
    main()
