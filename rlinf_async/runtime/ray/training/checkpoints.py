"""Where the checkpoints of a training group are, and from which rollout it goes on.

::

    SAVE/
      iter_0000007/                         every rank's shards, complete or absent
      latest_checkpointed_iteration.txt     "7", written when they are
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_async.observe.files import atomic_write
from rlinf_async.runtime.ray.training.args import TrainArgs

TRACKER: Final = "latest_checkpointed_iteration.txt"


class Start(NamedTuple):
    """Where training begins."""

    rollout_id: int
    """the next rollout"""
    checkpoint: Path | None
    """to go on from"""


def start_of(args: TrainArgs) -> Start:
    """Return where training goes on; at rollout 0 where there is nothing to load.

    Raises `ValueError` for a folder to load from without a checkpoint, unless it is the folder to
    save to as well, which has none at first.
    """
    if args.load is None:
        return Start(0, None)
    tracker = Path(args.load) / TRACKER
    if not tracker.is_file():
        if args.load == args.save:
            return Start(0, None)
        raise ValueError(
            f"load is {args.load!r}, but there is no {tracker}: no checkpoint was completed there. "
            "Leave load out to begin anew, or set it to the folder of save to go on if there is one"
        )
    text = tracker.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{tracker} says {text[:40]!r}; it must be the number of a rollout")
    folder = checkpoint_folder(args.load, int(text))
    if not folder.is_dir():
        raise ValueError(f"{tracker} names rollout {text}, but there is no {folder}")
    return Start(int(text) + 1, folder)


def checkpoint_folder(folder: str, rollout_id: int) -> Path:
    """Return the folder of the checkpoint after a rollout."""
    return Path(folder) / f"iter_{rollout_id:07d}"


def write_tracker(folder: str, rollout_id: int) -> None:
    """Record, atomically, that the checkpoint after this rollout is complete."""
    atomic_write(Path(folder) / TRACKER, f"{rollout_id}\n".encode())
