"""How far a run has come, the checkpoints that it goes on from, and what ends it before its time.

::

    checkpoints/
      latest.json           `RunProgress`: written last, in one atomic step; names the checkpoint,
                            and the best one
      version-000010/       written by the workers; the job may add files of its own
        progress.json       what latest.json was when this checkpoint was the newest

How a checkpoint looks inside, a backend knows. `rlinf_async.backends.checkpoint.folders` needs no
torch; it is imported when it is needed, as all of a backend is.

Beside an error of a worker's call, two things end a run early: a task of the driver that nobody
awaits fails; or an item is given up, for which somebody would wait for ever. A ticket or a question
that a death interrupts is delivered again, more often than its holders may die in a minute, so that
the restart policy gives up first; an item whose holders die slowly, again and again, is given up
all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec

from rlinf_async.channels import Channel
from rlinf_async.config import UsageError
from rlinf_async.observe.files import RunFolderError, atomic_write
from rlinf_async.observe.run_lock import release_lock, take_lock
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.targets import BEST, Best, KeepBestConfig, Reached, StopAtConfig
from rlinf_async.runtime.signals import Terminated
from rlinf_async.runtime.wakers import internal
from rlinf_async.workers.actor.training import TrainingWorker

PERIOD = 0.25
"""seconds between two looks for items that were given up"""
SPARE = 5
"""deliveries beyond those that the restart policy allows for"""


class ItemLost(RuntimeError):
    """An item was given up; the message names the channel and the last failure."""


def max_deliveries(holders: int, max_restarts: int) -> int:
    """Return how often to deliver an item that ``holders`` workers die of one after the other."""
    return holders * max_restarts + SPARE


@contextmanager
def abort_on_lost_items(cluster: Cluster) -> Iterator[None]:
    """Abort the cluster with `ItemLost` when an item is given up while the block runs."""
    watching = internal(asyncio.create_task(_watch(cluster), name="lost items"))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(cluster: Cluster) -> None:
    while True:
        lost = _first_lost(cluster)
        if lost is not None:
            return cluster.abort(lost)
        await asyncio.sleep(PERIOD)


def _first_lost(cluster: Cluster) -> ItemLost | None:
    for channel in cluster.channels.values():
        if isinstance(channel, Channel) and channel.dead_letters:
            letter = channel.dead_letters[0]
            return ItemLost(
                f"channel {channel.name!r}: {type(letter.item).__name__} was given up after "
                f"{letter.deliveries} deliveries, the last of which ended with: {letter.error}. "
                "See in the log why the workers that took it died, and go on with --resume"
            )
    return None


def start_background(
    cluster: Cluster, work: Coroutine[Any, Any, None], name: str
) -> asyncio.Task[None]:
    """Start a task of the driver; if it fails, the cluster ends with its error."""
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            cluster.abort(error)

    task.add_done_callback(ended)
    return task


@contextmanager
def in_background(cluster: Cluster, work: Coroutine[Any, Any, None], name: str) -> Iterator[None]:
    """`start_background` for the time of a block; what is not done by then is cancelled."""
    task = start_background(cluster, work, name)
    try:
        yield
    finally:
        task.cancel()


class Stopped(NamedTuple):
    """Outcome of a run that did not come to its end."""

    outcome: Literal["stopped", "terminated", "failed"]
    error: str | None
    """the first cause, of a run that failed"""

    @classmethod
    def by(cls, error: BaseException) -> Stopped:
        """The outcome of a run that this error ended."""
        if isinstance(error, Terminated):
            return cls("terminated", None)
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            return cls("stopped", None)
        return cls("failed", f"{type(error).__name__}: {error}")


PROGRESS = "latest.json"
OWN_PROGRESS = "progress.json"


class RunProgress(msgspec.Struct, kw_only=True):
    """Progress of a run. Each job adds the counts that its runs are measured by."""

    version: int = 0
    """number of iterations trained"""
    train_seconds: float = 0.0
    lag_sum: float = 0.0
    """sum over the iterations of their mean staleness, in versions"""
    lag_max: int = 0
    duplicates: int = 0
    """items that came a second time, and were left out"""
    checkpoint: str = ""
    """folder, relative to that of the checkpoints"""
    reached: Reached = Reached()
    """how near training is to the target at which it ends"""
    best: Best = Best()
    """the best checkpoint up to this one"""

    def aim(self, stop_at: StopAtConfig, keep_best: KeepBestConfig) -> None:
        """Go on under these settings: what was counted and found under others is forgotten."""
        self.reached = self.reached.under(stop_at)
        self.best = self.best.under(keep_best)

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.version if self.version else 0.0

    def at(self, checkpoint: str) -> bytes:
        """The content of ``latest.json`` for this moment, once this checkpoint is complete.

        Args:
            checkpoint: folder of the checkpoint, or its name.
        """
        return msgspec.json.encode(msgspec.structs.replace(self, checkpoint=Path(checkpoint).name))


AnyProgress = TypeVar("AnyProgress", bound=RunProgress)


def load_progress(
    checkpoints: Path, kind: type[AnyProgress], *, file: str = ""
) -> AnyProgress | None:
    """Return where to go on; None where there is no checkpoint.

    Args:
        checkpoints: the folder of the checkpoints.
        kind: the job's own progress.
        file: file that a checkpoint of this job has to contain.

    Raises:
        RunFolderError: ``latest.json``, or the checkpoint that it names, is damaged or missing.
    """
    latest = checkpoints / PROGRESS
    if not latest.exists():
        return None
    try:
        progress = msgspec.json.decode(latest.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{latest} cannot be read: {error}") from error
    if not (checkpoints / progress.checkpoint / file).exists():
        lacks = f" or has no {file}" if file else ""
        raise RunFolderError(
            f"{latest} names the checkpoint {progress.checkpoint!r}, which is not there{lacks}: "
            "restore it, or start again in another folder"
        )
    return progress


def named_checkpoint(run: Path, checkpoint: str) -> Path:
    """The folder of a checkpoint of the run in this folder.

    Args:
        run: folder of the run.
        checkpoint: name of the checkpoint, or the number of its version; or ``best``.

    Raises:
        UsageError: no such checkpoint, with those that there are.
    """
    checkpoints = run / "checkpoints"
    if checkpoint == BEST:
        return _best_checkpoint(run)
    name = folder_of(int(checkpoint)) if checkpoint.isdecimal() else checkpoint
    choices = sorted(path.parent.name for path in checkpoints.glob(f"[!.]*/{OWN_PROGRESS}"))
    if name not in choices:
        raise UsageError(
            f"--checkpoint {checkpoint}: {run} has no such checkpoint; it has: "
            f"{', '.join(choices) or 'none'}"
        )
    return checkpoints / name


def _best_checkpoint(run: Path) -> Path:
    """The folder of the best checkpoint that the newest one knows of."""
    progress = _newest(run)
    best = Best() if progress is None else progress.best
    asked, metric = f"--checkpoint {BEST}: {run}", best.wanted.metric
    if not metric:
        raise UsageError(
            f"{asked} has kept no best checkpoint: training.keep_best.metric says which it is, "
            "while the run goes on"
        )
    if not best.checkpoint:
        raise UsageError(
            f"{asked} has no best checkpoint yet: none had a {metric} by then (a return and a "
            "success rate count once training.return_window episodes have ended)"
        )
    folder = run / "checkpoints" / best.checkpoint
    if not folder.is_dir():
        raise UsageError(f"{asked} has lost its best checkpoint, {best.checkpoint}")
    return folder


def _newest(run: Path) -> RunProgress | None:
    """What is known of the newest checkpoint; None where there is none."""
    try:
        return load_progress(run / "checkpoints", RunProgress)
    except RunFolderError as error:
        raise UsageError(str(error)) from error


def checkpoint_of(run: Path, name: str | None, *, to: str = "evaluate") -> Path:
    """The folder of a checkpoint of the run in this folder: of this name or number, or the newest;
    ``to``: what is to be done with it.

    Raises:
        UsageError: there is none.
    """
    if name is not None:
        return named_checkpoint(run, name)
    progress = _newest(run)
    if progress is None:
        raise UsageError(f"{run}: there is no checkpoint yet, so there is nothing to {to}")
    return run / "checkpoints" / progress.checkpoint


@contextlib.contextmanager
def resuming_from(run: Path, checkpoint: str) -> Iterator[None]:
    """Within, the run in this folder resumes from an older checkpoint than its newest.

    What is refused within, with `UsageError`, leaves the newest the one to resume from.

    Args:
        run: folder of the run.
        checkpoint: name of the checkpoint, or the number of its version.

    Raises:
        UsageError: no such checkpoint, with those that there are; or a process runs there.
    """
    folder = named_checkpoint(run, checkpoint)
    latest = run / "checkpoints" / PROGRESS
    try:
        lock = take_lock(run)
    except RunFolderError as error:
        raise UsageError(str(error)) from error
    try:
        before, chosen = latest.read_bytes(), (folder / OWN_PROGRESS).read_bytes()
        atomic_write(latest, chosen)
    finally:
        release_lock(lock)
    try:
        yield
    except UsageError:
        if latest.read_bytes() == chosen:  # another process may have gone on from there
            atomic_write(latest, before)
        raise


async def make_latest(
    checkpoints: Path,
    checkpoint: str,
    progress: bytes,
    count: int,
    *,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Make this checkpoint the one to go on from; keep ``count - 1`` of those before it.

    Args:
        checkpoints: the folder of the checkpoints.
        checkpoint: folder of the checkpoint, or its name: complete, as its workers say.
        progress: `RunProgress.at` the moment that the checkpoint is of.
        count: checkpoints to keep.
        files: what the job adds to the checkpoint, by name.

    Raises:
        RunFolderError: it is not complete, or cannot be written.
    """
    name = Path(checkpoint).name

    def write() -> None:
        _check_complete(checkpoints / name)
        for file, content in {**(files or {}), OWN_PROGRESS: progress}.items():
            atomic_write(checkpoints / name / file, content)
        previous = _named(checkpoints / PROGRESS)
        atomic_write(checkpoints / PROGRESS, progress)
        best = msgspec.json.decode(progress, type=_Named).best.checkpoint
        _keep_newest(checkpoints, name, count, previous, best)

    await asyncio.to_thread(write)  # it waits for the disk, and removes gigabytes


class ShardWriters(Protocol):
    """The workers that hold the weights."""

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""


class ActorShards:
    """The actors of a run, as what a `Checkpointer` asks to write."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        """``group`` is of a `TrainingWorker`."""
        self.group = group

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""
        await self.group.call(TrainingWorker.begin_checkpoint, str(path))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self.group.call(TrainingWorker.checkpoint_written)


class Checkpointer:
    """Writes checkpoints while the run goes on, one at a time.

    ::

        begin       progress and files as they are now; the workers copy their weights
        meanwhile   the workers write ----> the job's files -> latest.json -> old ones go
        finish      waits for that

    Invariant: ``latest.json`` names a checkpoint only when all of it is on the disk. A run that is
    killed before goes on from the one before.

    Args:
        cluster: ends with the first checkpoint that fails.
        writers: the workers that hold the weights.
        checkpoints: folder of the checkpoints.
        count: checkpoints to keep.
    """

    def __init__(
        self, cluster: Cluster, writers: ShardWriters, checkpoints: Path, count: int
    ) -> None:
        self._cluster = cluster
        self._writers = writers
        self._checkpoints = checkpoints
        self._count = count
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, progress: RunProgress, files: Mapping[str, bytes] | None = None) -> None:
        """Start the checkpoint of this version; waits for the one before.

        Args:
            progress: progress of the run, now.
            files: what the job adds to the checkpoint, by name.
        """
        name = folder_of(progress.version)
        latest = progress.at(name)
        await self.finish()
        await self._writers.begin_save(self._checkpoints / name)
        self._writing = start_background(
            self._cluster, self._write(name, latest, files or {}), f"checkpoint {name}"
        )

    async def _write(self, name: str, latest: bytes, files: Mapping[str, bytes]) -> None:
        await self._writers.saved(self._checkpoints / name)
        await make_latest(self._checkpoints, name, latest, self._count, files=files)

    async def finish(self) -> None:
        """Wait until the checkpoint that was begun is on the disk. Raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Abandon what is being written, if anything is: the run has failed, and ends."""
        if self._writing is not None:
            self._writing.cancel()


def folder_of(version: int) -> str:
    """Return the name of a version's checkpoint; names sort as versions do."""
    return f"version-{version:06d}"


def versions_in(folder: Path) -> dict[Path, int]:
    """Return what is named after a version (`folder_of`), with it: checkpoints, those that are
    being written, and those that are being removed, too."""
    named = {path: re.search(r"version-(\d+)", path.name) for path in folder.glob("*")}
    return {path: int(found[1]) for path, found in named.items() if found}


def clean(checkpoints: Path) -> None:
    """Remove what a killed run has left half-written. For the start of a run."""
    from rlinf_async.backends.checkpoint import folders

    folders.clean(checkpoints)


def sibling(path: Path) -> Path:
    """Return where a part of a checkpoint is written that moves into it once it is complete."""
    return path.with_name(f".{path.name}.beside")


class _Named(msgspec.Struct):
    checkpoint: str
    best: Best = Best()


def _named(latest: Path) -> str | None:
    """The checkpoint that ``latest.json`` names; None where it is not there, or is damaged."""
    try:
        return msgspec.json.decode(latest.read_bytes(), type=_Named).checkpoint
    except (OSError, msgspec.DecodeError):
        return None


def _keep_newest(
    checkpoints: Path, newest: str, count: int, previous: str | None, best: str
) -> None:
    """Older ones go, unless they are being read or the best, and those that ``latest.json`` never
    named. Later ones are left alone: they may be on their way to become the newest."""
    from rlinf_async.backends.checkpoint import folders

    folders.keep_newest(checkpoints, newest, count, previous=previous, best=best)


def _check_complete(checkpoint: Path) -> None:
    """Raise `RunFolderError` unless the folder has its final name.

    It has not where every rank has written, but not all to the disk that this process sees.
    """
    from rlinf_async.backends.checkpoint import folders

    if not checkpoint.is_dir() or folders.staging_folder(checkpoint).exists():
        raise RunFolderError(
            f"{checkpoint} is not complete though every actor has written its part: not all write "
            "to the same disk as this process; put the run's folder on a disk that they share"
        )
