"""Two FSDP ranks against one: ``python -m tests.backends.vision_language.sharded`` does 10 updates.

Prints the largest difference of any weight, and of any metric, after them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.vision_language.kit import trainer_config, trajectory


def train(rank: int, world_size: int, folder: Path, updates: int) -> None:
    """Take ``updates`` optimizer steps, each on everything that the ranks have."""
    config = trainer_config(minibatch_size=32 // world_size)
    config = msgspec.structs.replace(
        config, ppo=msgspec.structs.replace(config.ppo, epochs=updates)
    )
    trainer = EmbodiedTrainer(config, world_size, rank)
    mine = [trajectory(stage) for stage in range(rank, 2, world_size)]
    metrics = trainer.train(mine)
    state = trainer.manager.get_model_state_dict(everywhere=True)
    save_result(folder, rank, {"metrics": dict(metrics), "state": state})


def differences(updates: int, folder: Path) -> tuple[float, float]:
    """The largest difference of weights, and of the gradient norm, between two ranks and one."""
    single, double = folder / "single", folder / "double"
    single.mkdir()
    double.mkdir()
    train(0, 1, single, updates)
    expected = load_result(single, 0)
    found: list[Any] = in_processes(train, 2, double, updates)
    weights = max(
        float((one["state"][name] - tensor).abs().max())
        for one in found
        for name, tensor in expected["state"].items()
    )
    norm = max(abs(one["metrics"]["grad_norm"] - expected["metrics"]["grad_norm"]) for one in found)
    return weights, norm


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        weights, norm = differences(10, Path(folder))
    reached = weights < 1e-5
    print(f"10 updates, two ranks against one: weights within {weights:.1e}, norm {norm:.1e}")
    print("reached: 1e-5" if reached else "NOT reached: 1e-5")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
