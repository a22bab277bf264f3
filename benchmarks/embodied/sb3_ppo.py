"""Stable-Baselines3's PPO on HalfCheetah-v5: prints its speed and return as one line of JSON.

    python sb3_ppo.py SEED THREADS

Runs in the peer's virtualenv. The settings are those of ``benchmarks/half_cheetah_ppo.toml``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import stable_baselines3 as sb3  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import torch

ENV = "HalfCheetah-v5"
ENVS = 8
STEPS = 200_000
LAST_EPISODES = 24
EVALUATION_EPISODES = 10
EVALUATION_SEED = 10_000


def vector(count: int, seed: int) -> Any:
    """``count`` environments that are stepped one after the other in this process."""
    in_process = sb3.common.vec_env.DummyVecEnv
    return sb3.common.env_util.make_vec_env(ENV, count, seed, vec_env_cls=in_process)


def trained(seed: int, threads: int) -> tuple[Any, float]:
    """The model after training, and the seconds that its training took."""
    torch.set_num_threads(threads)
    model = sb3.PPO(
        "MlpPolicy",
        vector(ENVS, seed),
        learning_rate=3e-4,
        n_steps=256,
        batch_size=256,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        stats_window_size=LAST_EPISODES,
        device="cpu",
        seed=seed,
    )
    start = time.perf_counter()
    model.learn(total_timesteps=STEPS)
    return model, time.perf_counter() - start


def main(seed: int, threads: int) -> None:
    model, seconds = trained(seed, threads)
    episode_returns = [episode["r"] for episode in model.ep_info_buffer]
    evaluated, _ = sb3.common.evaluation.evaluate_policy(
        model, vector(1, EVALUATION_SEED + seed), EVALUATION_EPISODES, deterministic=True
    )
    measured = {
        "steps_per_second": model.num_timesteps / seconds,
        "return": evaluated,
        "train_return": np.mean(episode_returns),
    }
    print(json.dumps({name: float(value) for name, value in measured.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
