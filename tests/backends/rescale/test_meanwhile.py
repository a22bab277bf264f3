"""What goes along with a change of ranks, and what goes on beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import (
    config,
    copied,
    in_processes,
    save_result,
    set_up,
    train_steps,
)
from tests.backends.rescale.kit import BUCKET, LIMIT, small_shards_too

SCALER = (2.0**9, 7)
"""factor, good steps"""


def meanwhile(rank: int, world_size: int, folder: Path) -> None:
    """Two of four ranks train in float16; a checkpoint of theirs is written while all join."""
    small_shards_too()
    manager = set_up(config(precision="float16"), world_size, rank)
    rescale(manager, Strategy(dp=2), timeout=LIMIT, bucket_bytes=BUCKET)
    if manager.active:
        train_steps(manager, range(2))
        manager.grad_scaler.factor, manager.grad_scaler.good_steps = SCALER
    weights, steps = copied(manager), manager.steps  # a step that overflows is skipped
    first = manager.begin_checkpoint(folder / "of two", {"rank": rank})
    rescale(manager, Strategy(dp=4), timeout=LIMIT, bucket_bytes=BUCKET)
    scaler = (manager.grad_scaler.factor, manager.grad_scaler.good_steps)
    train_steps(manager, range(2, 4))
    later = copied(manager)
    manager.begin_checkpoint(folder / "of four").result()
    save_result(
        folder,
        rank,
        {
            "scaler": scaler,
            "good steps": manager.grad_scaler.good_steps,
            "written": str(first.result()),
            "weights": weights,
            "steps": [steps, manager.steps],
            "later": later,
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return in_processes(meanwhile, 4, folder)


def test_ranks_that_join_go_on_with_the_loss_scaler_of_those_that_trained(
    ranks: list[dict[str, Any]],
) -> None:
    assert [one["scaler"] for one in ranks] == [SCALER] * 4
    assert [one["good steps"] for one in ranks] == [SCALER[1] + 2] * 4


def test_a_checkpoint_that_is_written_while_ranks_change_is_of_before(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    before, after = ranks[0]["steps"]
    assert after == before + 2
    for name, weights, steps, scaler in (
        ("of two", ranks[0]["weights"], before, SCALER),
        ("of four", ranks[0]["later"], after, (SCALER[0], SCALER[1] + 2)),
    ):
        found = set_up(config(precision="float16"))
        extras = found.load_checkpoint(folder / name)
        assert found.steps == steps
        assert (found.grad_scaler.factor, found.grad_scaler.good_steps) == scaler
        for key, tensor in copied(found).items():
            assert tensor.equal(weights[key]), (name, key)
        if name == "of two":
            assert [one["rank"] for one in extras] == [0, 1]
