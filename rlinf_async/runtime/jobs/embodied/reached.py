"""What a run has reached: kept beside its checkpoints, so that it can go on from there."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write


class Reached(msgspec.Struct, kw_only=True):
    """How far a run has come. Written with every checkpoint, in one atomic step after it."""

    version: int = 0
    env_steps: int = 0
    train_seconds: float = 0.0
    episodes: int = 0
    lag_sum: float = 0.0
    """of the mean lag of each iteration"""
    lag_max: int = 0
    duplicates: int = 0
    returns: list[float] = []
    """of the last episodes"""
    successes: list[bool] = []
    checkpoint: str = ""
    """folder, relative to that of the checkpoints"""

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.version if self.version else 0.0

    def take(self, report: TrainReport, seconds: float, window: int) -> None:
        """Add one iteration."""
        self.version = report.version
        self.env_steps += report.env_steps
        self.train_seconds = seconds
        self.episodes += len(report.episode_return)
        self.lag_sum += report.lag_mean
        self.lag_max = max(self.lag_max, report.lag_max)
        self.duplicates += report.duplicates
        self.returns = list(deque([*self.returns, *report.episode_return], window))
        self.successes = list(deque([*self.successes, *report.episode_success], window))


class Parts:
    """Joins the reports of all actor ranks on their equal shares into one for each iteration."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, list[TrainReport]] = {}

    def join(self, part: TrainReport) -> TrainReport | None:
        """The whole report, once every rank's part is there."""
        parts = self._open.setdefault(part.iteration, [])
        parts.append(part)
        return _merged(self._open.pop(part.iteration)) if len(parts) == self._ranks else None


def _merged(parts: Sequence[TrainReport]) -> TrainReport:
    """Counts add up; metrics and lags are means, as all shares are equal; the checkpoint is one."""
    return msgspec.structs.replace(
        parts[0],
        metrics={
            name: sum(one.metrics[name] for one in parts) / len(parts) for name in parts[0].metrics
        },
        env_steps=sum(one.env_steps for one in parts),
        lag_mean=sum(one.lag_mean for one in parts) / len(parts),
        lag_max=max(one.lag_max for one in parts),
        duplicates=sum(one.duplicates for one in parts),
        episode_return=[value for one in parts for value in one.episode_return],
        episode_length=[value for one in parts for value in one.episode_length],
        episode_success=[value for one in parts for value in one.episode_success],
    )


def load_reached(checkpoints: Path) -> Reached | None:
    """Where to go on; None where there is no checkpoint.

    Raises:
        RunFolderError: the note, or the checkpoint that it names, is damaged or missing.
    """
    note = checkpoints / "latest.json"
    if not note.exists():
        return None
    try:
        reached = msgspec.json.decode(note.read_bytes(), type=Reached)
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{note} cannot be read: {error}") from error
    if not (checkpoints / reached.checkpoint).is_dir():
        raise RunFolderError(
            f"{note} names the checkpoint {reached.checkpoint!r}, which is not there: restore it, "
            "or start again in another folder"
        )
    return reached


def keep(checkpoints: Path, reached: Reached, checkpoint: str, count: int) -> None:
    """Note this checkpoint as the one to go on from; of those before it, keep ``count - 1``.

    Later ones are left alone: the actors may have written the next one already.
    """
    reached.checkpoint = Path(checkpoint).name
    atomic_write(checkpoints / "latest.json", msgspec.json.encode(reached))
    so_far = [path for path in checkpoints.glob("version-*") if path.name <= reached.checkpoint]
    for path in sorted(so_far)[:-count]:
        shutil.rmtree(path, ignore_errors=True)
