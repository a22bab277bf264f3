"""A policy of a few thousand weights, and observations that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import (
    CloningConfig,
    EmbodiedTrainerConfig,
    FSDPConfig,
    PPOConfig,
)
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.messages.embodied import Trajectory
from rlinf_async.messages.spaces import (
    ObservationArray,
    ObservationPart,
    ObservationSpec,
    continuous,
)

SPEC = ObservationSpec(
    (
        ObservationPart(name="state", kind="state", shape=(2,)),
        ObservationPart(name="image", kind="image", shape=(8, 8, 3)),
        ObservationPart(name="instruction", kind="text", shape=(6,)),
    )
)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "layers": 2,
    "vision_layers": 1,
    "heads": 2,
    "patch_size": 4,
    "scale_factor": 2,
    "bins": 7,
}
EXECUTED, NUMBERS = 3, 2


def config(*, token_values: bool = False, **fields: Any) -> PolicyConfig:
    """Chunks of 3 actions of 2 numbers."""
    return PolicyConfig(
        name="vision_language_action",
        observation=SPEC,
        observation_size=2,
        action=continuous(EXECUTED * NUMBERS),
        action_size=EXECUTED * NUMBERS,
        action_chunk=EXECUTED,
        token_values=token_values,
        vision_language=VisionLanguageConfig(**(SIZES | fields)),
    )


def trainer_config(**fields: Any) -> EmbodiedTrainerConfig:
    """Two updates, each of everything that a rank has."""
    ppo = PPOConfig(
        epochs=2, minibatch_size=fields.pop("minibatch_size", 32), log_prob_level="token",
        normalize_advantage="batch",
    )  # fmt: skip
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(policy=config(), optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1.0)),
        ppo=ppo,
        cloning=CloningConfig(**fields),
    )


def observations(count: int, seed: int = 0) -> ObservationArray:
    """Images, instructions of different lengths, and states."""
    drawn = np.random.default_rng(seed)
    seen = SPEC.empty(count)
    seen["state"] = drawn.normal(size=(count, 2))
    seen["image"] = drawn.integers(0, 256, (count, 8, 8, 3))
    words = [b"red", b"green", b"a blue"]
    seen["instruction"] = [
        np.frombuffer(words[i % 3].ljust(6, b"\0"), np.uint8) for i in range(count)
    ]
    return seen


def trajectory(stage: int, *, steps: int = 4, envs: int = 4) -> Trajectory:
    """What a stage collected, with episodes that end within chunks."""
    drawn = np.random.default_rng(stage)
    ended = drawn.random((steps, envs)) < 0.3
    count = np.where(ended, drawn.integers(1, EXECUTED + 1, (steps, envs)), EXECUTED)
    executed = np.arange(EXECUTED) < count[..., None]
    reward = np.where(executed, drawn.normal(size=executed.shape), 0.0).astype(np.float32)
    tokens = EXECUTED * NUMBERS
    bins = (drawn.integers(0, 7, (steps, envs, tokens)) + 0.5) * 2 / 7 - 1
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=stage,
        observation=observations(steps * envs, seed=stage).reshape(steps, envs),
        action=bins.astype(np.float32),
        log_prob=(drawn.normal(size=(steps, envs, tokens)) * 0.1 - 2).astype(np.float32),
        value=drawn.normal(size=(steps + 1, envs, EXECUTED)).astype(np.float32),
        reward=reward.sum(-1),
        terminated=ended & (drawn.random((steps, envs)) < 0.5),
        truncated=ended,
        final_value=np.where(ended, 0.3, 0.0).astype(np.float32),
        version=np.zeros(steps, np.int64),
        action_reward=reward,
        executed=executed,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
