"""Two FSDP ranks clone and train flow policies as one does: each trunk, both kinds of noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    write_episode,
    write_info,
)
from tests.backends.flow_action.kit import NUMBERS, TRUNKS, observations, trainer_config, trajectory
from tests.backends.fsdp_helpers import in_processes, load_result, save_result

CELLS = [("network", "numbers"), ("sde", "images"), ("network", "text")]


def demonstrate(folder: Path, trunk: str) -> None:
    """Three episodes, of which the last is shorter than a chunk."""
    drawn = np.random.default_rng(0)
    for number, length in enumerate((6, 5, 2)):
        action = drawn.uniform(-1.0, 1.0, (length, NUMBERS)).astype(np.float32)
        seen = observations(TRUNKS[trunk], length, seed=number)
        write_episode(folder, number, DemonstratedEpisode(seen, action))
    write_info(
        folder,
        DemonstrationsInfo(
            env="Arm",
            episodes=3,
            successes=3,
            observation=TRUNKS[trunk],
            action_size=NUMBERS,
        ),
    )


def train(rank: int, world_size: int, folder: Path, shown: Path) -> None:
    """Clone three steps, and take two updates of everything that the ranks have."""
    result: dict[str, Any] = {}
    for noise, trunk in CELLS:
        config = trainer_config(
            noise,
            trunk,
            minibatch_size=32 // world_size,
            demonstrations=str(shown / trunk),
            steps=3,
            batch_size=6,
        )
        trainer = EmbodiedTrainer(config, world_size, rank)
        cloned = trainer.clone()
        stages = range(rank, 2, world_size)
        metrics = trainer.train([trajectory(config.fsdp.policy, stage) for stage in stages])
        state = trainer.manager.get_model_state_dict(everywhere=True)
        result[trunk] = {
            "state": state,
            "numbers": [cloned["cloning_loss"], metrics["grad_norm"]],
        }
    save_result(folder, rank, result)


def test_two_ranks_clone_and_train_like_one(tmp_path: Path) -> None:
    single, double, shown = tmp_path / "single", tmp_path / "double", tmp_path / "shown"
    for folder in (single, double, *(shown / trunk for trunk in TRUNKS)):
        folder.mkdir(parents=True)
    for trunk in TRUNKS:
        demonstrate(shown / trunk, trunk)
    train(0, 1, single, shown)
    expected = load_result(single, 0)
    for found in in_processes(train, 2, double, shown):
        for _, trunk in CELLS:
            one, other = found[trunk], expected[trunk]
            assert np.allclose(one["numbers"], other["numbers"], atol=1e-5), trunk
            for name, tensor in other["state"].items():
                assert float((one["state"][name] - tensor).abs().max()) < 1e-5, (trunk, name)
