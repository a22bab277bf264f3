"""A checkpoint, or a run at its newest one, resharded offline for other ranks.

::

    IN                              OUT
    checkpoint/                     checkpoint/
      actor's files                   resharded (`cutting`)
      critic/                         resharded, as every folder that is a checkpoint itself
      run.msgpack                     copied, as everything else
    run/                            run/
      checkpoints/version-000010/     as above
      checkpoints/latest.json         copied
      (older checkpoints)             --
      everything else, not hidden     copied

So a run resumes from OUT as it would from IN. Invariants: IN is only read; OUT gets its name when
all of it is on the disk, and the metadata that marks a checkpoint as complete is written last.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlinf_async.backends.checkpoint.copying import Copies, visible
from rlinf_async.backends.checkpoint.cutting import Cutting
from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import (
    being_read,
    find_checkpoint,
    newest_note,
    sync,
    write_whole,
)
from rlinf_async.backends.checkpoint.metadata import METADATA
from rlinf_async.backends.checkpoint.streaming import Advance, new_folder


class Resharded(NamedTuple):
    """The result of a resharding."""

    folder: Path
    ranks: int
    bytes: int
    """bytes written, without metadata"""
    cut: tuple[str, ...]
    """names of the checkpoints inside the checkpoint that were resharded too, such as a critic's"""
    copied: tuple[str, ...]
    """names of the other files that were copied, such as a run's position"""
    of_run: bool
    """whether it is a run's folder"""


class Resharding:
    """One resharding. `run` writes it; ``total_bytes`` is known before.

    Args:
        path: a checkpoint's folder; or that of a run, or of its checkpoints, for the newest.
        dp: ranks that share each tensor's rows.
        tp: tensor-parallel ranks.

    Raises `CheckpointError` for a folder that is damaged, or whose tensors are not known where that
    is needed, and `StrategyError` for sizes that do not divide, with the nearest that do.
    """

    def __init__(self, path: Path, *, dp: int, tp: int) -> None:
        self._path = path
        self._newest = newest_note(path)
        checkpoint = path if self._newest is None else self._newest.checkpoint
        self._inside = Path() if self._newest is None else checkpoint.relative_to(path)
        self._folder = find_checkpoint(checkpoint)
        with being_read(self._folder):
            self._whole = _Contents(self._folder, dp, tp)
        self._of_run = len(self._inside.parts) > 1
        around = set(visible(path)) - {self._inside.parts[0]} if self._of_run else set[str]()
        self._around = Copies(path, around)
        self.total_bytes = self._whole.total_bytes + self._around.total_bytes

    def run(self, out: Path, advance: Advance = lambda _: None) -> Resharded:
        """Write the folder ``out``, which must not exist yet."""
        if out.resolve().is_relative_to(self._path.resolve()):
            raise CheckpointError(
                f"{out} lies inside {self._path}, which is only read: name a folder elsewhere"
            )
        with being_read(self._folder), new_folder(out) as folder:
            target = folder / self._inside
            target.mkdir(parents=True, exist_ok=True)
            self._whole.write(target, advance)
            self._around.write(folder, advance)
            if self._newest is not None:
                note = folder / self._newest.note.relative_to(self._path)
                sync(note.parent)
                write_whole(note, self._newest.content)
        whole = self._whole
        cut, copied = tuple(sorted(whole.inner)), whole.copies.names
        return Resharded(
            out, whole.cutting.ranks, self.total_bytes, cut, copied, of_run=self._of_run
        )


class _Contents:
    """A checkpoint's folder with everything in it."""

    def __init__(self, folder: Path, dp: int, tp: int) -> None:
        self.cutting = Cutting(folder, dp=dp, tp=tp)
        beside = set(visible(folder)) - self.cutting.names
        checkpoints = {one for one in beside if (folder / one / METADATA).is_file()}
        self.inner = {one: _Contents(folder / one, dp, tp) for one in sorted(checkpoints)}
        self.copies = Copies(folder, beside - checkpoints)

    @property
    def total_bytes(self) -> int:
        """The size of the result."""
        inside = sum(one.total_bytes for one in self.inner.values())
        return self.cutting.total_bytes + self.copies.total_bytes + inside

    def write(self, target: Path, advance: Advance) -> None:
        """Write it into an empty folder."""
        self.cutting.write(target, advance)
        for name, one in self.inner.items():
            (target / name).mkdir()
            one.write(target / name, advance)
        self.copies.write(target, advance)
        self.cutting.finish(target)
