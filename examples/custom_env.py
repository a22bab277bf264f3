"""Your own Gymnasium environment, trained by PPO over env, rollout and actor workers.

    python examples/custom_env.py [--steps 60000] [--out runs/custom]

A disc on a table is pushed towards a goal: from 0 to 100 % success in some ten seconds. Each env
worker makes the environment in its own process, by its entry point: ``"file.py:name"`` or
``"package.module:name"``. The same settings work in a TOML file for ``rlinf-async train``::

    job = "embodied_ppo"
    [env]
    entry_point = "examples/custom_env.py:PushDisc"
    kwargs = {goal_radius = 0.1}
"""

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlinf_async.runtime.jobs.embodied import (
    EmbodiedConfig,
    EmbodiedEvaluationConfig,
    EmbodiedPPO,
    EmbodiedTrainingConfig,
)
from rlinf_async.workers.env import EnvConfig

EPISODE_STEPS = 40


class PushDisc(gymnasium.Env[Any, Any]):
    """Shows goal, position and speed (each x and y); an action is a push."""

    def __init__(self, goal_radius: float = 0.1) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        self.goal_radius = goal_radius

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.goal, self.position = self.np_random.uniform(-1.0, 1.0, (2, 2))
        self.speed, self.steps = np.zeros(2), 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.speed = 0.8 * self.speed + 0.1 * action
        self.position = self.position + self.speed
        self.steps += 1
        distance = float(np.linalg.norm(self.goal - self.position))
        info = {"is_success": distance < self.goal_radius}  # reported, and shown as success rate
        # The episode is truncated, not terminated: the value of its last observation bootstraps it.
        return self._shown(), -distance, False, self.steps >= EPISODE_STEPS, info

    def _shown(self) -> Any:
        return np.concatenate([self.goal, self.position, self.speed])


def config(steps: int) -> EmbodiedConfig:
    """The settings that ``rlinf-async train`` reads from a file, as typed Structs."""
    return EmbodiedConfig(
        name="push-disc",
        env=EnvConfig(id="PushDisc", entry_point=f"{Path(__file__).resolve()}:PushDisc", envs=16),
        training=EmbodiedTrainingConfig(total_steps=steps, steps_per_iteration=120),
        evaluation=EmbodiedEvaluationConfig(episodes=50, video_episodes=0, target_success_rate=0.9),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train PPO on an environment of this file.")
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--out", type=Path, help="run folder (default: runs/push-disc-<time>)")
    given = parser.parse_args()
    EmbodiedPPO().run(config(given.steps), given.out, resume=False)
