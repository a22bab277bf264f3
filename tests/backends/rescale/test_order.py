"""Which rows an active rank holds, and how little of them travels when their number doubles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.fsdp import sharding as groups
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.rescale import rescale
from rlinf_async.backends.fsdp.sharding import order_of
from rlinf_async.backends.fsdp.state import first_row, local_shard
from rlinf_async.parallel import Strategy
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.rescale.kit import BUCKET, LIMIT

SIZES = (4, 2, 4, 3, 4, 1)
"""how many ranks train, one after the other"""
ROWS = 24
"""of a tensor: as many for each of 2, 3 and 4 ranks"""
INNER = 300
WHOLE = 3 * 2 * ROWS * INNER * 4
"""bytes of weights and moments"""
HEADERS = 0.01
"""part of the bytes, at most, that a bucket says of itself"""
UNEVEN = 7
"""rows of a bias: some ranks have fewer, or none"""


class Numbered(nn.Module):
    """Tensors whose every element is another number; nothing is computed with them."""

    def __init__(self, *, uneven: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for index, block in enumerate(self.blocks):
            block.register_parameter("weight", numbered(ROWS, INNER, first=10_000 * index))
        if uneven:
            self.bias = numbered(UNEVEN, first=50_000)


def numbered(*shape: int, first: int) -> nn.Parameter:
    count = torch.Size(shape).numel()
    return nn.Parameter(torch.arange(first, first + count, dtype=torch.float32).view(shape))


class Manager(FSDPModelManager):
    """The manager of `Numbered`."""

    def __init__(self, world_size: int, rank: int, *, uneven: bool = False) -> None:
        super().__init__(ShardingConfig(), world_size, rank, lambda: Numbered(uneven=uneven))
        self.setup_model_and_optimizer()

    def take_a_step(self) -> None:
        """Give the optimizer its moments, other ones for each element."""
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer_step()

    def go_to(self, size: int) -> int:
        """Rescale; how many bytes this rank has sent."""
        return rescale(self, Strategy(dp=size), timeout=LIMIT, bucket_bytes=BUCKET).sent_bytes

    def whole(self) -> dict[str, Tensor]:
        """Weights and moments, gathered. Collective."""
        found = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            for kind, one in {"weight": parameter, **state}.items():
                full = one.full_tensor() if isinstance(one, DTensor) else one
                found[f"{name} {kind}"] = full.detach().clone()
        return found

    def rows(self) -> dict[str, list[int]]:
        """The first row of each tensor that this rank has, and how many."""
        return {
            name: [first_row(one) if isinstance(one, DTensor) else 0, len(local_shard(one))]
            for name, one in self.model.named_parameters()
        }


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, one in found.items() if not torch.equal(one, expected[name])]


def around(rank: int, world_size: int, folder: Path) -> None:
    """Train on the sizes; what each rank has there. Then the same in the order of the numbers."""
    manager = Manager(world_size, rank, uneven=True)
    fresh = Manager(1, 0, uneven=True)
    result: dict[str, Any] = {"fresh": differing(manager.whole(), fresh.whole()), "at": []}
    manager.take_a_step()
    expected = manager.whole()
    for size in SIZES:
        manager.go_to(size)
        if manager.active:
            told = [int(one) for one in collectives.all_gather(manager, torch.tensor([rank]))]
            found = differing(manager.whole(), expected)
            result["at"].append({"rows": manager.rows(), "told": told, "changed": found})
        else:
            result["at"].append(None)
    result["sent"] = sent_on_the_way(Manager(world_size, rank))
    groups._can_order = lambda: False
    result["sent by number"] = sent_on_the_way(Manager(world_size, rank))
    save_result(folder, rank, result)


def sent_on_the_way(manager: Manager) -> list[int]:
    """From 4 ranks to 2 and back."""
    manager.take_a_step()
    return [manager.go_to(size) for size in (2, 4)]


def saved_and_loaded(rank: int, world_size: int, folder: Path) -> None:
    """Checkpoints of 4 and 3 ranks, loaded by 4, 3 and 2."""
    manager = Manager(world_size, rank, uneven=True)
    changed: dict[str, list[str]] = {}
    expected: dict[int, dict[str, Tensor]] = {}
    for size in (4, 3):
        manager.go_to(size)
        if manager.active:
            manager.take_a_step()
            expected[size] = manager.whole()
            manager.save_checkpoint(folder / f"of {size}")
    for size in (4, 3, 2):
        manager.go_to(size)
        for saved in (4, 3) if manager.active else ():
            for one in manager.model.parameters():
                local_shard(one).detach().fill_(-1.0)
            manager.load_checkpoint(folder / f"of {saved}")
            whole = manager.whole()
            if saved in expected:  # rank 3 was idle among three
                changed[f"{saved} in {size}"] = differing(whole, expected[saved])
    save_result(folder, rank, {"changed": changed, "expected": expected})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(around, 4, tmp_path_factory.mktemp("around"))


def test_every_rank_holds_the_rows_of_its_place_in_the_order(
    results: list[dict[str, Any]],
) -> None:
    for at, size in enumerate(SIZES):
        for place, rank in enumerate(order_of(size)):
            rows = results[rank]["at"][at]["rows"]
            for name, whole in (("blocks.1.weight", ROWS), ("bias", UNEVEN)):
                assert rows[name] == list(dealt(whole, size, place)), (size, rank, name)


def dealt(rows: int, shards: int, place: int) -> tuple[int, int]:
    """The first row of a shard, and how many it has."""
    chunk = -(-rows // shards)
    first, end = (min(one * chunk, rows) for one in (place, place + 1))
    return first, end - first


def test_tensors_that_are_gathered_on_three_and_four_ranks_are_whole_and_in_order(
    results: list[dict[str, Any]],
) -> None:
    assert [result["fresh"] for result in results] == [[]] * 4
    assert [one["changed"] for one in seen(results)] == [[]] * sum(SIZES)


def test_what_the_active_ranks_tell_each_other_is_in_the_order_of_their_numbers(
    results: list[dict[str, Any]],
) -> None:
    for at, size in enumerate(SIZES):
        for result in results[:size]:
            assert result["at"][at]["told"] == list(range(size))


def seen(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for result in results for one in result["at"] if one is not None]


def test_from_two_to_four_ranks_half_of_all_bytes_travel_and_each_sends_the_same_to_one(
    results: list[dict[str, Any]],
) -> None:
    assert order_of(4) == (0, 2, 1, 3)
    halved, doubled = zip(*(result["sent"] for result in results), strict=True)
    quarter = pytest.approx(WHOLE / 4, rel=HEADERS)
    assert halved == (0, 0, quarter, quarter)
    assert doubled == (quarter, quarter, 0, 0)


def test_in_the_order_of_their_numbers_three_quarters_would(
    results: list[dict[str, Any]],
) -> None:
    for sent in zip(*(result["sent by number"] for result in results), strict=True):
        assert sum(sent) == pytest.approx(WHOLE * 3 / 4, rel=HEADERS)


def test_a_checkpoint_of_three_or_four_ranks_is_loaded_by_any_number(tmp_path: Path) -> None:
    found = in_processes(saved_and_loaded, 4, tmp_path)
    names = {f"{saved} in {size}" for saved in (4, 3) for size in (4, 3, 2)}
    assert found[0]["changed"] == {name: [] for name in names}
    alone = Manager(1, 0, uneven=True)
    for saved in (4, 3):
        alone.load_checkpoint(tmp_path / f"of {saved}")
        assert differing(alone.whole(), found[0]["expected"][saved]) == []


def test_where_torch_cannot_make_groups_in_another_order_it_is_that_of_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(ranks: list[int]) -> None:
        """As torch was before it had the parameter."""

    assert order_of(3) == (0, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", older)
        assert order_of(3) == (0, 1, 2)
    monkeypatch.setattr(dist, "config", SimpleNamespace(use_torchcomms=True), raising=False)
    assert order_of(3) == (0, 1, 2)
