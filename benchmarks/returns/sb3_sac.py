"""Stable-Baselines3's SAC on Pendulum-v1: prints its return and speed as one line of JSON.

    python sb3_sac.py SEED EPISODES [TOTAL_STEPS]

Runs in the peer's virtualenv. The settings are those of ``examples/sac_pendulum.toml``.
"""

from __future__ import annotations

import json
import sys
import time

import stable_baselines3 as sb3  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import torch

ENV = "Pendulum-v1"
EVALUATION_SEED = 10_000


def main(seed: int, episodes: int, total: int = 10_000) -> None:
    """Train, evaluate, and print what was measured."""
    torch.set_num_threads(1)
    make = sb3.common.env_util.make_vec_env
    model = sb3.SAC(
        "MlpPolicy",
        make(ENV, 1, seed),
        learning_rate=1e-3,
        buffer_size=50_000,
        learning_starts=200,
        batch_size=256,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=seed,
    )
    start = time.perf_counter()
    model.learn(total_timesteps=total)
    seconds = time.perf_counter() - start
    evaluated, _ = sb3.common.evaluation.evaluate_policy(
        model, make(ENV, 1, EVALUATION_SEED), episodes, deterministic=True
    )
    measured = {"return": float(evaluated), "steps_per_second": model.num_timesteps / seconds}
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
