"""World size 2 against world size 1, over gloo, in real processes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.fsdp.sharding import break_cycles
from rlinf_async.backends.fsdp.state import first_row, local_shard
from tests.backends.fsdp_helpers import (
    POLICY,
    in_processes,
    load_result,
    samples,
    save_result,
    set_up,
    train_steps,
)

STRATEGIES = ["fsdp2", "fsdp1"]


def config(strategy: str) -> FSDPConfig:
    optimizer = OptimizerConfig(lr=1e-2, value_lr=3e-2, max_grad_norm=0.3)
    if strategy == "fsdp1":
        return FSDPConfig(policy=POLICY, strategy="fsdp1", optimizer=optimizer)
    return FSDPConfig(policy=POLICY, optimizer=optimizer)


def train_and_save(rank: int, world_size: int, folder: Path, strategy: str) -> None:
    manager = set_up(config(strategy), world_size, rank)
    before = train_steps(manager, range(3), micro_batches=2)
    manager.save_checkpoint(folder / "checkpoint", {"rank": rank})
    after = train_steps(manager, range(3, 6))
    state = manager.get_model_state_dict(everywhere=rank > 0 or world_size > 1)
    save_result(folder, rank, {"losses": before + after, "state": state})


def load_and_train(rank: int, world_size: int, folder: Path, strategy: str) -> None:
    manager = set_up(config(strategy), world_size, rank)
    with torch.no_grad():
        for parameter in manager.model.parameters():
            local_shard(parameter).fill_(9.0)
    extras = manager.load_checkpoint(folder / "checkpoint")
    losses = train_steps(manager, range(3, 6))
    state = manager.get_model_state_dict(everywhere=True)
    save_result(folder, rank, {"losses": losses, "state": state, "extras": extras})


def assert_same_run(left: Any, right: Any, steps: slice = slice(None)) -> None:
    torch.testing.assert_close(
        torch.tensor(left["losses"]), torch.tensor(right["losses"])[steps], atol=1e-6, rtol=1e-5
    )
    assert left["state"].keys() == right["state"].keys()
    for name, tensor in left["state"].items():
        torch.testing.assert_close(tensor, right["state"][name], atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    train_and_save(0, 1, folder, "fsdp2")
    return folder


@pytest.fixture(scope="module", params=STRATEGIES)
def double(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"double_{request.param}")
    in_processes(train_and_save, 2, folder, request.param)
    return folder


def test_two_ranks_train_like_one(single: Path, double: Path) -> None:
    for rank in range(2):
        assert_same_run(load_result(double, rank), load_result(single, 0))


def test_a_checkpoint_of_two_ranks_goes_on_under_one(single: Path, double: Path) -> None:
    manager = set_up(config("fsdp2"))
    extras = manager.load_checkpoint(double / "checkpoint")
    resumed = {"losses": train_steps(manager, range(3, 6)), "state": manager.get_model_state_dict()}
    assert extras == [{"rank": 0}, {"rank": 1}]
    assert_same_run(resumed, load_result(single, 0), slice(3, None))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_one_rank_goes_on_under_two(
    single: Path, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "checkpoint").symlink_to(single / "checkpoint")
    for result in in_processes(load_and_train, 2, tmp_path, strategy):
        assert_same_run(result, load_result(single, 0), slice(3, None))


def check_details(rank: int, world_size: int, folder: Path) -> None:
    manager = set_up(config("fsdp2"), world_size, rank)
    result: dict[str, Any] = {"keys": list(manager.get_model_state_dict())}
    shards = [p for p in manager.model.parameters() if isinstance(p, DTensor)]
    result["rows"] = [(first_row(shard), len(local_shard(shard))) for shard in shards]
    norm = _poisoned_step(manager)
    result["skipped"] = (norm, manager.skipped_steps, manager.steps)
    manager.offload_optimizer()
    manager.offload_param_and_grad()
    manager.save_checkpoint(folder / "offloaded")
    manager.load_checkpoint(folder / "offloaded")
    result["offloaded"] = manager.param_offloaded
    manager.load_param_and_grad()
    manager.load_optimizer()
    train_steps(manager, range(1))
    target = folder / "unwritable" if rank == 1 else folder / "fine"
    result["error"] = _failing_save(manager, target)
    result["left"] = _left_without_a_collection(world_size, rank)
    save_result(folder, rank, result)


def _left_without_a_collection(world_size: int, rank: int) -> int:
    """Modules of a sharded model that are there when nobody has it any more."""
    gc.disable()
    try:
        manager = set_up(config("fsdp2"), world_size, rank)
        modules = [weakref.ref(one) for one in manager.model.modules()]
        break_cycles(manager.model, manager.optimizer)
        del manager.model
        return sum(one() is not None for one in modules)
    finally:
        gc.enable()


def _poisoned_step(manager: Any) -> float:
    # Only one rank sees the NaN; both must skip.
    batch = samples(0)
    if manager.rank == 1:
        batch.vectors.fill_(float("nan"))
    evaluation = manager.model(batch.observation, batch.action)
    manager.backward(evaluation.value.mean())
    norm, _ = manager.optimizer_step()
    return float(norm)


def _failing_save(manager: Any, target: Path) -> str:
    # The ranks disagree on the folder: rank 1's was never prepared, so its write fails.
    try:
        manager.save_checkpoint(target)
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "no error"


def test_the_ranks_agree_on_everything_else(tmp_path: Path) -> None:
    first, second = in_processes(check_details, 2, tmp_path)
    assert "actor.0.weight" in first["keys"]
    assert second["keys"] == []
    assert (0, 4) in first["rows"]
    assert (4, 3) in second["rows"]
    for result in (first, second):
        assert result["skipped"][0] != result["skipped"][0]
        assert result["skipped"][1:] == (1, 0)
        assert result["offloaded"] is True
        assert result["left"] == 0
    assert first["error"].startswith("CheckpointError: writing")
    assert "failed on rank [1]" in first["error"]
    assert second["error"].startswith("FileNotFoundError")
