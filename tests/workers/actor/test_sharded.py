"""Real actors in processes of their own, with FSDP2 over gloo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # assert_close does so at its first use: not in the loop
from torch import Tensor

import rlinf_async as ra
from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig, PPOConfig
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.messages.embodied import Floats, Trajectory
from rlinf_async.weights import unpack
from rlinf_async.workers.actor import EmbodiedFSDPActor, TrainingPlan
from tests.workers.actor.toy import Channels

STEPS, ENVS, OBSERVATION, ACTION = 8, 3, 5, 2
ITERATIONS, TRAJECTORIES = 2, 4


def trainer(world_size: int) -> EmbodiedTrainerConfig:
    """Whole-batch updates: the shuffle, which is each rank's own, then changes nothing."""
    policy = PolicyConfig(observation_size=OBSERVATION, action_size=ACTION, hidden_sizes=(7,))
    share = STEPS * ENVS * TRAJECTORIES // world_size
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(policy=policy),
        ppo=PPOConfig(epochs=3, minibatch_size=share, normalize_advantage="batch"),
    )


def trajectory(iteration: int, stage: int) -> Trajectory:
    """Random, as a policy near the standard normal would have acted."""
    random = np.random.default_rng([iteration, stage])

    def draw(*shape: int) -> Floats:
        return random.standard_normal(shape).astype(np.float32)

    action = draw(STEPS, ENVS, ACTION)
    log_prob = (-0.5 * action**2 - 0.5 * np.log(2 * np.pi)).sum(-1).astype(np.float32)
    return Trajectory(
        iteration=iteration,
        env_rank=0,
        stage=stage,
        observation=draw(STEPS, ENVS, OBSERVATION),
        action=action,
        log_prob=log_prob,
        value=draw(STEPS + 1, ENVS),
        reward=draw(STEPS, ENVS),
        terminated=random.random((STEPS, ENVS)) < 0.1,
        truncated=np.zeros((STEPS, ENVS), np.bool_),
        final_value=np.zeros((STEPS, ENVS), np.float32),
        version=np.full(STEPS, iteration, np.int64),
    )


async def trained(world_size: int) -> dict[str, Tensor]:
    """Weights and normalisers after two iterations on the same trajectories."""
    async with ra.Cluster.process() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(
            EmbodiedFSDPActor,
            trainer(world_size),
            count=world_size,
            collective="gloo" if world_size > 1 else None,
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        plan = TrainingPlan(iterations=ITERATIONS, trajectories=TRAJECTORIES)
        training = actors.call(
            EmbodiedFSDPActor.run_training,
            plan,
            channels.trajectories.receiver,
            channels.weights.sender,
            channels.reports.sender,
        )
        for iteration in range(ITERATIONS):
            for stage in range(TRAJECTORIES):
                made = trajectory(iteration, stage)
                await channels.trajectories.sender.put(made, key=stage % world_size)
        assert await training == [ITERATIONS] * world_size
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
