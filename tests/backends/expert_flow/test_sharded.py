"""Two FSDP ranks clone and train the policies of LeRobot's folders as one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("transformers")

from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.backends.base import LoraConfig, OptimizerConfig
from rlinf_async.backends.fsdp.config import (
    CloningConfig,
    EmbodiedTrainerConfig,
    FSDPConfig,
    PPOConfig,
)
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    write_episode,
    write_info,
)
from rlinf_async.messages.embodied import Trajectory
from tests.backends.expert_flow import pi0, smolvla
from tests.backends.expert_flow.kit import (
    NUMBERS,
    SPEC,
    config,
    observations,
)
from tests.backends.flow_action.kit import trajectory
from tests.backends.fsdp_helpers import in_processes, load_result, save_result

CELLS: dict[str, dict[str, Any]] = {
    "network": {},
    "sde": {"noise": "sde"},
    "lora": {"lora": LoraConfig(rank=2)},
    "pi0": {"name": "pi0"},
    "pi0 lora": {"name": "pi0", "lora": LoraConfig(rank=2)},
}
UNITS = {"smolvla": {"model.expert.layers"}, "pi0": {"model.trunk.text_model.layers"}}
"""the layers that have the most numbers, each of which is a unit of FSDP2"""
WRITE: Any = {
    "smolvla": smolvla.write_folder,
    "pi0": partial(pi0.write_folder, train_expert_only=False),
}


def trainer_config(folders: Path, shown: Path, cell: str, ranks: int) -> EmbodiedTrainerConfig:
    own = CELLS[cell]
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(
            policy=config(folders / str(own.get("name", "smolvla")), **own),
            optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1.0),
        ),
        ppo=PPOConfig(
            minibatch_size=16 // ranks,
            epochs=1,
            normalize_advantage="batch",
            log_prob_level="token",
        ),
        advantage=AdvantageConfig(),
        cloning=CloningConfig(demonstrations=str(shown), steps=2, batch_size=6),
    )


def demonstrate(folder: Path) -> None:
    """Three episodes, of which the last is shorter than a chunk."""
    folder.mkdir()
    drawn = np.random.default_rng(0)
    for number, length in enumerate((6, 5, 2)):
        action = drawn.uniform(-1.0, 1.0, (length, NUMBERS)).astype(np.float32)
        write_episode(
            folder, number, DemonstratedEpisode(observations(length, seed=number), action)
        )
    info = DemonstrationsInfo(
        env="Arm", episodes=3, successes=3, observation=SPEC, action_size=NUMBERS
    )
    write_info(folder, info)


def collected(made: EmbodiedTrainerConfig, stage: int) -> Trajectory:
    """Two steps of four environments, some of which end within a chunk."""
    seen = observations(8, seed=stage).reshape(2, 4)
    return trajectory(made.fsdp.policy, stage, steps=2, seen=seen)


def train(rank: int, ranks: int, results: Path, folders: Path, shown: Path) -> None:
    """Clone two steps, and take an update of everything that the ranks have."""
    found: dict[str, Any] = {}
    for cell in CELLS:
        made = trainer_config(folders, shown, cell, ranks)
        trainer = EmbodiedTrainer(made, ranks, rank)
        sharded = {
            name.rpartition(".")[0]
            for name, one in trainer.manager.model.named_modules()
            if name and isinstance(one, FSDPModule)
        }
        assert sharded == (UNITS[made.fsdp.policy.name] if ranks > 1 else set()), cell
        cloned = trainer.clone()
        stages = range(rank, 2, ranks)
        metrics = trainer.train([collected(made, stage) for stage in stages])
        state = trainer.manager.get_model_state_dict(everywhere=True)
        found[cell] = {
            "state": state,
            "numbers": [cloned["cloning_loss"], metrics["grad_norm"]],
        }
    save_result(results, rank, found)


def test_two_ranks_clone_and_train_like_one(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    before = {
        name: PolicyServer(config(write(tmp_path / name), name=name)).policy.state_dict()
        for name, write in WRITE.items()
    }
    demonstrate(shown)
    single, double = tmp_path / "single", tmp_path / "double"
    single.mkdir()
    double.mkdir()
    train(0, 1, single, tmp_path, shown)
    expected = load_result(single, 0)
    for found in in_processes(train, 2, double, tmp_path, shown):
        for cell, other in expected.items():
            one = found[cell]
            assert np.allclose(one["numbers"], other["numbers"], rtol=1e-4, atol=1e-5), cell
            for name, tensor in other["state"].items():
                assert float((one["state"][name] - tensor).abs().max()) < 1e-5, (cell, name)
    # The trunk stays as it was, as the folder says, and the expert does not.
    for name, tensor in expected["network"]["state"].items():
        same = torch.equal(tensor, before["smolvla"][name])
        if name.startswith("model."):
            assert same == name.startswith("model.trunk."), name
    # That of pi0 is trained, which its folder says, but with adapters.
    for name in ("text_model.embed_tokens.weight", "vision_model.post_layernorm.weight"):
        first = before["pi0"][f"model.trunk.{name}"]
        assert not torch.equal(expected["pi0"]["state"][f"model.trunk.{name}"], first), name
        assert torch.equal(expected["pi0 lora"]["state"][f"model.trunk.{name}"], first), name
