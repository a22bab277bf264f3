"""Checkpoints are those of the ranks that train, while their number changes."""

from __future__ import annotations

from pathlib import Path

import torch

from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.parallel import Strategy
from tests.backends.checkpoint.kit import noted
from tests.backends.fsdp_helpers import in_processes, load_result, save_result, set_up, train_steps
from tests.backends.test_fsdp_sharded import config


def save_and_shrink(rank: int, world_size: int, folder: Path) -> None:
    manager = set_up(config("fsdp2"), world_size, rank)
    train_steps(manager, range(2))
    first = manager.begin_checkpoint(folder / "two")
    rescale(manager, Strategy(dp=1))  # the first one may still be written
    if manager.active:
        train_steps(manager, range(2, 3))
    second = manager.begin_checkpoint(folder / "one")
    paths = [str(first.result(60)), str(second.result(60))]
    save_result(folder, rank, {"active": manager.active, "paths": paths})


def test_the_active_ranks_write_and_idle_ones_have_no_part(tmp_path: Path) -> None:
    in_processes(save_and_shrink, 2, tmp_path)
    assert [load_result(tmp_path, rank)["active"] for rank in range(2)] == [True, False]
    assert [noted(tmp_path / name).strategy.dp for name in ("two", "one")] == [2, 1]
    steps = []
    for name in ("two", "one"):
        found = set_up(config("fsdp2"))
        found.load_checkpoint(tmp_path / name)
        steps.append(found.steps)
        assert all(bool(torch.isfinite(one).all()) for one in found.model.parameters())
    assert steps == [2, 3]
