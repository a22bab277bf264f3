"""`Checkpointer`: one checkpoint at a time, and `latest.json` names only complete ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.observe.files import RunFolderError
from rlinf_async.runtime.jobs.checkpoints import Checkpointer, RunProgress, load_progress
from rlinf_async.testing import run


class Writers:
    """Workers whose checkpoints are written when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_write = asyncio.Event()
        self.fails = False

    async def begin_save(self, path: Path) -> None:
        self.begun.append(path.name)
        self._path = path

    async def saved(self, path: Path) -> None:
        await self.may_write.wait()
        if self.fails:
            raise OSError("the disk is full")
        await asyncio.to_thread(path.mkdir)


def latest(folder: Path) -> int | None:
    progress = load_progress(folder, RunProgress)
    return None if progress is None else progress.version


def test_the_next_checkpoint_waits_for_the_one_before_and_is_named_once_it_is_whole(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            writers = Writers()
            with Checkpointer(cluster, writers, tmp_path, count=2) as checkpointer:
                await checkpointer.begin(RunProgress(version=1), {"run": b"of 1"})
                second = asyncio.create_task(checkpointer.begin(RunProgress(version=2)))
                await asyncio.sleep(0)
                assert writers.begun == ["version-000001"]
                assert latest(tmp_path) is None
                writers.may_write.set()
                await second
                assert writers.begun == ["version-000001", "version-000002"]
                assert latest(tmp_path) == 1
                assert (tmp_path / "version-000001" / "run").read_bytes() == b"of 1"
                await checkpointer.finish()
                assert latest(tmp_path) == 2

    asyncio.run(main())


def test_the_progress_of_a_checkpoint_is_that_of_its_beginning(tmp_path: Path) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            writers, progress = Writers(), RunProgress(version=3, train_seconds=1.0)
            with Checkpointer(cluster, writers, tmp_path, count=1) as checkpointer:
                await checkpointer.begin(progress)
                progress.version, progress.train_seconds = 4, 2.0
                writers.may_write.set()
                await checkpointer.finish()
        found = load_progress(tmp_path, RunProgress)
        assert found is not None
        assert (found.version, found.train_seconds) == (3, 1.0)

    asyncio.run(main())


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        writers = Writers()
        writers.may_write.set()
        async with ra.Cluster.local() as cluster:
            with Checkpointer(cluster, writers, tmp_path, count=2) as checkpointer:
                await checkpointer.begin(RunProgress(version=1))
                await checkpointer.finish()
                writers.fails = True
                await checkpointer.begin(RunProgress(version=2))
                await asyncio.Event().wait()  # the cluster ends it

    with pytest.raises(OSError, match="the disk is full"):
        asyncio.run(main())
    assert latest(tmp_path) == 1


def test_a_run_that_fails_abandons_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            with Checkpointer(cluster, Writers(), tmp_path, count=2) as checkpointer:
                await checkpointer.begin(RunProgress(version=1))
                raise RunFolderError("something else")

    with pytest.raises(RunFolderError, match="something else"):
        run(main())
    assert latest(tmp_path) is None
