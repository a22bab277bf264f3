"""The shards that torch makes are those that the layouts say: FSDP2 and FSDP1, any world size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlinf_async.backends.fsdp.sharding import Groups, order_of
from rlinf_async.parallel import FSDP1, FSDP2, Layout, Model, Strategy, layout
from tests.parallel.arrays import Array, scatter

SHAPES = [(1, 1), (2, 7), (7, 3), (16, 5), (9, 1)]


@contextlib.contextmanager
def pretended(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    """This process as one rank of many, whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def network() -> nn.Sequential:
    """Linear layers of all kinds of sizes, every element another number."""
    made = nn.Sequential(*(nn.Linear(inside, outside) for inside, outside in SHAPES))
    first = 1
    for parameter in made.parameters():
        count = parameter.numel()
        values = torch.arange(first, first + count, dtype=torch.float32)
        parameter.data = values.view_as(parameter)
        first += count
    return made


def laid_out(
    sharding: FSDP1 | FSDP2, world_size: int, ranks: Sequence[int] | None = None
) -> tuple[Layout, dict[int, dict[str, Array]]]:
    plain = network()
    names = {name: tuple(one.shape) for name, one in plain.named_parameters()}
    made = layout(Model.of(names), Strategy(dp=world_size, sharding=sharding), ranks)
    whole = {name: one.detach().numpy() for name, one in plain.named_parameters()}
    return made, scatter(made, whole)


def assert_dealt(mesh: DeviceMesh, expected: dict[str, Array]) -> None:
    """What torch gives this rank of the network is what the layout says."""
    model = network()
    fully_shard(model, mesh=mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach().numpy()
        assert local.shape == expected[name].shape, name
        assert (local == expected[name]).all(), name


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16])
def test_fully_shard_gives_every_rank_the_rows_that_the_layout_says(world_size: int) -> None:
    _, expected = laid_out(FSDP2(), world_size)
    for rank in range(world_size):
        with pretended(rank, world_size) as mesh:
            assert_dealt(mesh, expected[rank])


@pytest.mark.parametrize(("active", "launched"), [(3, 3), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_active_ranks_have_their_rows_in_the_order_of_their_group(
    active: int, launched: int
) -> None:
    _, expected = laid_out(FSDP2(), active, order_of(active))
    for rank in range(active):
        with pretended(rank, launched):
            groups = Groups(launched)
            groups.launch()
            groups.prepare(active, known=active == launched)
            group = groups.active(active)
            assert group is not None
            assert_dealt(DeviceMesh.from_group(group, "cpu"), expected[rank])


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_fsdp1_gives_every_rank_the_flat_range_that_the_layout_says(
    world_size: int, use_orig_params: bool
) -> None:
    made, expected = laid_out(FSDP1(use_orig_params=use_orig_params), world_size)
    for rank in range(world_size):
        with pretended(rank, world_size) as mesh:
            model = FullyShardedDataParallel(
                network(),
                use_orig_params=use_orig_params,
                device_mesh=mesh,
                device_id=torch.device("cpu"),
            )
            handle = model._handle
            assert handle is not None
            flat = handle.flat_param.detach().numpy()
            mine = expected[rank]["_flat_param"]
            [buffer] = made.of_rank(rank)
            assert flat.shape == buffer.shape
            for piece in buffer.pieces:
                stop = piece.offset + torch.Size(piece.size).numel()
                window = slice(piece.offset, stop)
                assert (flat[window] == mine[window]).all()
