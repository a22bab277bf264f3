"""Real actors in processes of their own, with FSDP2 over gloo."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed.tensor  # assert_close does so at its first use: not in the loop
from torch import Tensor

import rlinf_async as ra
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import EmbodiedFSDPActor
from tests.backends.rescale.kit import TRAJECTORIES, embodied_config, trajectory
from tests.workers.actor.toy import Channels, Plan

ITERATIONS = 2


async def trained(world_size: int) -> dict[str, Tensor]:
    """Weights and normalisers after two iterations on the same trajectories."""
    async with ra.Cluster.process() if world_size > 1 else ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(
            EmbodiedFSDPActor,
            embodied_config(world_size),
            count=world_size,
            collective="gloo" if world_size > 1 else None,
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        plan = Plan(ITERATIONS, trajectories=TRAJECTORIES)
        training = asyncio.create_task(channels.train(actors, plan))
        for iteration in range(ITERATIONS):
            for stage in range(TRAJECTORIES):
                made = trajectory(iteration, stage)
                await channels.trajectories.sender.put(made, key=stage % world_size)
        assert len(await training) == ITERATIONS * world_size
        update = await channels.weights.receiver.get()
    assert update.version == ITERATIONS
    return unpack(update)


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_two_sharded_ranks_train_to_the_weights_of_one(loop_kind: str) -> None:
    one, two = await trained(1), await trained(2)
    assert one.keys() == two.keys()
    biases = [tensor for name, tensor in one.items() if name.endswith("bias")]
    assert biases  # they begin at 0
    assert all(tensor.abs().min() > 1e-5 for tensor in biases)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
