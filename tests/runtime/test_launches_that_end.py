"""A launch that is cancelled, or whose cluster is left: nothing of it stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rlinf_async as ra
from tests.runtime.kit import NewCluster


class Slow(ra.Worker):
    """Rank 0 is there at once, the others never are. Notes in a folder who was taken down."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def setup(self) -> None:
        if self.rank:
            await asyncio.Event().wait()

    async def teardown(self) -> None:
        (self.folder / f"{self.name} left").touch()

    async def rank_of(self) -> int:
        return self.rank


async def under_way(cluster: ra.Cluster, folder: Path) -> asyncio.Task[ra.WorkerGroup[Slow]]:
    """A launch of which rank 0 has started, and rank 1 never will have."""
    launching = asyncio.create_task(cluster.launch(Slow, str(folder), count=2))
    while not _is_there(cluster):  # noqa: ASYNC110  # nobody tells of a launch that is under way
        await asyncio.sleep(0.001)
    return launching


def _is_there(cluster: ra.Cluster) -> bool:
    group = cluster.groups.get("Slow")
    return group is not None and group.supervisors[0].live is not None


async def test_a_launch_that_is_cancelled_stops_the_ranks_that_were_there(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    async with new_cluster(grace=30.0) as cluster:
        launching = await under_way(cluster, tmp_path)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert (tmp_path / "Slow[0] left").exists()
        assert cluster.groups == {}
        again = await cluster.launch(Slow, str(tmp_path), count=1)
        assert await again.call(Slow.rank_of) == [0]


async def test_a_launch_whose_cluster_is_left_ends_with_it_and_raises(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    async with new_cluster(grace=30.0) as cluster:
        launching = await under_way(cluster, tmp_path)
    with pytest.raises(ra.BuildError, match="Slow: this cluster was left while it started"):
        await launching
    assert (tmp_path / "Slow[0] left").exists()
