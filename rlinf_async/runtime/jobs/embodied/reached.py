"""What a run has reached: kept beside its checkpoints, so that it can go on from there."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlinf_async.messages.embodied import TrainReport
from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write
from rlinf_async.runtime.jobs.checkpoints import check_complete, keep_newest


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
    """Joins the reports of all actor ranks on their equal shares into one for each iteration.

    A checkpoint is written when every rank has written its part, which they may report with
    different iterations.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[int, list[TrainReport]] = {}
        self._parts: Counter[str] = Counter()

    def join(self, part: TrainReport) -> TrainReport | None:
        """The whole report, once every rank's part is there."""
        parts = self._open.setdefault(part.iteration, [])
        parts.append(part)
        if part.checkpoint is not None:
            self._parts[part.checkpoint] += 1
        if len(parts) < self._ranks:
            return None
        return msgspec.structs.replace(
            _merged(self._open.pop(part.iteration)), checkpoint=self._written()
        )

    def _written(self) -> str | None:
        """The newest checkpoint that is complete and was not told yet."""
        complete = [path for path, parts in self._parts.items() if parts == self._ranks]
        for path in complete:
            del self._parts[path]
        return max(complete, default=None)


def _merged(parts: Sequence[TrainReport]) -> TrainReport:
    """Counts add up; metrics and lags are means, as all shares are equal."""
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


def noted(reached: Reached, checkpoint: str) -> bytes:
    """What is to be written of this moment once its checkpoint is complete."""
    name = Path(checkpoint).name
    return msgspec.json.encode(msgspec.structs.replace(reached, checkpoint=name))


async def keep(checkpoints: Path, checkpoint: str, books: bytes, count: int) -> None:
    """Make this checkpoint the one to go on from; of those before it, keep ``count - 1``.

    Raises `RunFolderError` unless it is complete.
    """
    name = Path(checkpoint).name
    check_complete(checkpoints / name)
    atomic_write(checkpoints / "latest.json", books)
    await asyncio.to_thread(keep_newest, checkpoints, name, count)  # it removes gigabytes
