"""Stable-Baselines3's PPO on the images of ``examples/reach_env.py``: prints success and speed.

    python sb3_pixel_reach.py SEED EPISODES [TOTAL_STEPS]

Runs in the peer's virtualenv. Settings and network are those of ``examples/pixel_reach.toml``: its
own CNN needs larger images.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import stable_baselines3 as sb3  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor, nn

ENVS, STEPS, TOTAL = 32, 64, 102_400
EVALUATION_SEED = 10_000
CHANNELS = (3, 16, 32, 32)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
reach_env: Any = importlib.import_module("reach_env")


class Encoder(sb3.common.torch_layers.BaseFeaturesExtractor):  # type: ignore[misc]
    """Three convolutions of stride 2, which actor and critic share."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 4 * 4 * CHANNELS[-1])
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(CHANNELS):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())

    def forward(self, images: Tensor) -> Any:
        return self.layers(images)


def vector(count: int, seed: int) -> Any:
    """``count`` environments that are stepped one after the other in this process."""
    return sb3.common.env_util.make_vec_env(
        reach_env.ReachTargets, count, seed, env_kwargs={"pixels_only": True}
    )


def success(model: Any, episodes: int) -> float:
    """The share of deterministic episodes that succeed."""
    env = reach_env.ReachTargets(pixels_only=True)
    succeeded = 0
    for episode in range(episodes):
        seen, _ = env.reset(seed=EVALUATION_SEED + episode)
        ended, info = False, {}
        while not ended:
            # Stable-Baselines3 has images with channels first.
            action, _ = model.predict(seen.transpose(2, 0, 1), deterministic=True)
            seen, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        succeeded += bool(info["is_success"])
    return succeeded / episodes


def main(seed: int, episodes: int, total: int = TOTAL) -> None:
    """Train, evaluate, and print what was measured."""
    torch.set_num_threads(1)
    model = sb3.PPO(
        "CnnPolicy",
        vector(ENVS, seed),
        learning_rate=1e-3,
        n_steps=STEPS,
        batch_size=256,
        n_epochs=4,
        gamma=0.8,
        gae_lambda=0.9,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={
            "features_extractor_class": Encoder,
            "net_arch": [64, 64],
            "activation_fn": nn.Tanh,
            "log_std_init": -0.5,
        },
        device="cpu",
        seed=seed,
    )
    start = time.perf_counter()
    model.learn(total_timesteps=total)
    seconds = time.perf_counter() - start
    measured = {"success": success(model, episodes), "steps_per_second": total / seconds}
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
