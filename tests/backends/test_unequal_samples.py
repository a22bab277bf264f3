"""Ranks with different numbers of samples: simulators that begin episodes in a step of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.messages.embodied import Trajectory
from tests.backends.fsdp_helpers import in_processes, save_result

STEPS, ENVS = 6, 2
CONFIG = EmbodiedTrainerConfig(
    fsdp=FSDPConfig(policy=PolicyConfig(observation_size=3, action_size=2, hidden_sizes=(5,))),
    # One optimizer step for each epoch, so that only the means decide.
    ppo=PPOConfig(epochs=2, minibatch_size=2 * STEPS * ENVS, normalize_advantage="batch"),
)


def trajectory(stage: int, begun: tuple[tuple[int, int], ...]) -> Trajectory:
    """``begun``: steps and environments in which an episode was only begun."""
    drawn = np.random.default_rng(stage)
    valid = np.ones((STEPS, ENVS), np.bool_)
    terminated = np.zeros((STEPS, ENVS), np.bool_)
    for step, env in begun:
        valid[step, env] = False
        terminated[step - 1, env] = True

    def numbers(*shape: int) -> Any:
        return drawn.normal(size=shape).astype(np.float32)

    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=stage,
        observation=numbers(STEPS, ENVS, 3),
        action=numbers(STEPS, ENVS, 2),
        log_prob=numbers(STEPS, ENVS) - 3.0,
        value=numbers(STEPS + 1, ENVS),
        reward=numbers(STEPS, ENVS),
        terminated=terminated,
        truncated=np.zeros((STEPS, ENVS), np.bool_),
        final_value=np.zeros((STEPS, ENVS), np.float32),
        version=np.zeros(STEPS, np.int64),
        valid=valid,
    )


BOTH = [trajectory(0, ((2, 0), (4, 1), (5, 0))), trajectory(1, ((3, 1),))]


def trained(rank: int, world_size: int, folder: Path) -> None:
    trainer = EmbodiedTrainer(CONFIG, world_size, rank)
    mine = [one for one in BOTH if one.stage % world_size == rank]
    metrics = trainer.train(mine)
    weights = {
        name: tensor.clone() for name, tensor in trainer.manager.get_model_state_dict().items()
    }
    save_result(folder, rank, {"weights": weights, "metrics": dict(metrics)})


def test_no_sample_is_left_out_and_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    ranks = in_processes(trained, 2, tmp_path)
    two = ranks[0]
    [one] = in_processes(trained, 1, tmp_path)
    untrained = EmbodiedTrainer(CONFIG, 1, 0).manager.get_model_state_dict()
    assert one["weights"].keys() == two["weights"].keys()
    moved = 0.0
    for name, weight in one["weights"].items():
        moved = max(moved, float((weight - untrained[name]).abs().max()))
        assert torch.allclose(weight, two["weights"][name], atol=1e-6), name
    assert moved > 1e-4
    for name in ("policy_loss", "value_loss", "entropy"):
        mean = sum(rank["metrics"][name] for rank in ranks) / 2  # as reports of ranks are merged
        assert abs(one["metrics"][name] - mean) < 1e-5, name
