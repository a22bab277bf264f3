"""Weights and moments that a rank keeps in a change of ranks stay where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.reshard.ranks import STATES, BlocksManager
from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.backends.fsdp.sharding import sharded_over
from rlinf_async.backends.fsdp.state import local_shard
from rlinf_async.parallel import Strategy, plan
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.rescale.kit import LIMIT

PARAMETERS = 8.4e6
"""two matrices, 32 MiB each in all: 4,096 x 1,024 and back"""
CHANGES = (2, 4, 3, 1, 4)


def change(rank: int, world_size: int, folder: Path) -> None:
    manager = BlocksManager(PARAMETERS, world_size, rank)
    manager.take_a_step()
    found: dict[str, Any] = {"changes": [reports(manager, size) for size in CHANGES]}
    manager.save_checkpoint(folder / "checkpoint")
    manager.load_checkpoint(folder / "checkpoint")
    found["loaded"] = reports(manager, 2)
    found["looked at"] = looked_at(manager)
    save_result(folder, rank, found)


def reports(manager: BlocksManager, size: int) -> tuple[int, int]:
    """Bytes that this rank kept in place when it changed, and those that it could keep."""
    assert manager.shard_memory is not None
    whole, old = manager.shard_memory.description, manager.world_size
    moves = plan(sharded_over(whole, old), sharded_over(whole, size)).of_rank(manager.rank)
    kept = rescale(manager, Strategy(dp=size), timeout=LIMIT).kept_bytes
    return kept, STATES * sum(4 * run.elements for run in moves.copies)


def looked_at(manager: BlocksManager) -> dict[str, bool]:
    """Two ranks train, four take a step, and two train again, while somebody looks at the first."""
    look = [local_shard(one).detach() for one in manager.model.parameters() if manager.active]
    seen = [one.clone() for one in look]
    rescale(manager, Strategy(dp=4), timeout=LIMIT)
    manager.take_a_step()
    rescale(manager, Strategy(dp=2), timeout=LIMIT)
    new = [local_shard(one).detach() for one in manager.model.parameters() if manager.active]
    halves = [slice(len(one) // 2, None) for one in look]  # went to another rank, and came back
    return {
        "stays": all(a[half].equal(b[half]) for a, b, half in zip(look, seen, halves, strict=True)),
        "new": all(
            not a[half].equal(b[half]) for a, b, half in zip(new, seen, halves, strict=True)
        ),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(change, 4, tmp_path_factory.mktemp("ranks"))


def test_all_that_a_rank_keeps_stays_in_place_from_the_first_change_on(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(ranks):
        for kept, could_keep in found["changes"]:
            assert kept == could_keep, (rank, found["changes"])
    assert sum(found["changes"][0][0] for found in ranks) > 0


def test_so_it_does_after_a_checkpoint_was_loaded(ranks: list[dict[str, Any]]) -> None:
    assert all(kept == could_keep for kept, could_keep in (one["loaded"] for one in ranks))
    assert sum(found["loaded"][0] for found in ranks) > 0


def test_who_looks_at_weights_that_a_rank_gave_up_sees_what_they_were(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(one["looked at"] == {"stays": True, "new": True} for one in ranks)
