"""Stable-Baselines3's PPO on FetchReachDense-v4: prints speed and seconds to success as JSON.

    python sb3_fetch_reach.py SEED THREADS [TOTAL_STEPS]

Runs in the peer's virtualenv. The settings are those of ``examples/fetch_reach_ppo.toml``:
observations and rewards are normalised by running statistics (`VecNormalize`).
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from typing import Any

import gymnasium
import stable_baselines3 as sb3  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import torch

ENV = "FetchReachDense-v4"
ENVS, STEPS, TOTAL = 8, 100, 36_000
WANTED, EPISODES = 0.95, 100
"""share of the last episodes that succeed, and how many those are"""


class Reached(sb3.common.callbacks.BaseCallback):  # type: ignore[misc]
    """Notes when enough of the last episodes had succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.seconds = time.perf_counter(), math.inf

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        successes = self.model.ep_success_buffer
        rate = sum(successes) / len(successes) if successes else 0.0
        if rate >= WANTED:
            self.seconds = min(self.seconds, time.perf_counter() - self.start)


def main(seed: int, threads: int, total: int = TOTAL) -> None:
    """Train, and print what was measured."""
    torch.set_num_threads(threads)
    gymnasium.register_envs(importlib.import_module("gymnasium_robotics"))
    in_process = sb3.common.vec_env.DummyVecEnv
    envs: Any = sb3.common.env_util.make_vec_env(ENV, ENVS, seed, vec_env_cls=in_process)
    envs = sb3.common.vec_env.VecNormalize(envs, gamma=0.95)
    model = sb3.PPO(
        "MultiInputPolicy",
        envs,
        learning_rate=1e-3,
        n_steps=STEPS,
        batch_size=200,
        n_epochs=10,
        gamma=0.95,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={
            "net_arch": [64, 64],
            "activation_fn": torch.nn.Tanh,
            "log_std_init": -0.5,
        },
        stats_window_size=EPISODES,
        device="cpu",
        seed=seed,
    )
    reached = Reached()
    start = reached.start = time.perf_counter()
    model.learn(total_timesteps=total, callback=reached)
    measured = {
        "steps_per_second": model.num_timesteps / (time.perf_counter() - start),
        "seconds_to_success": reached.seconds,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
