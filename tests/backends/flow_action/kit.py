"""A flow policy of a few hundred weights, and what it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import (
    CloningConfig,
    EmbodiedTrainerConfig,
    FSDPConfig,
    PPOConfig,
)
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.flow_action.config import FlowConfig
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.messages.embodied import Trajectory
from rlinf_async.messages.spaces import (
    ObservationArray,
    ObservationPart,
    ObservationSpec,
    continuous,
)
from tests.backends.vision_language.kit import SIZES

NUMBERS, EXECUTED, STEPS = 2, 3, 4
SIZE = NUMBERS * EXECUTED
VECTOR = ObservationSpec((ObservationPart(name="state", kind="state", shape=(5,)),))
IMAGE = ObservationSpec(
    (
        ObservationPart(name="state", kind="state", shape=(5,)),
        ObservationPart(name="image", kind="image", shape=(8, 8, 3)),
    )
)
TEXT = ObservationSpec((*IMAGE.parts, ObservationPart(name="instruction", kind="text", shape=(6,))))
TRUNKS = {"numbers": VECTOR, "images": IMAGE, "text": TEXT}
NOISES = {
    "network": FlowConfig(steps=STEPS, least_deviation=0.1, largest_deviation=0.4),
    "sde": FlowConfig(steps=STEPS, noise="sde", noise_level=0.6),
}


def config(noise: str = "network", trunk: str = "numbers", **fields: Any) -> PolicyConfig:
    """Chunks of 3 actions of 2 numbers."""
    own: dict[str, Any] = {"flow": NOISES[noise], "observation": TRUNKS[trunk]}
    if trunk == "images":
        own["channels"] = (4, 4)
    if trunk == "text":
        sizes = {name: size for name, size in SIZES.items() if name != "bins"}
        own["vision_language"] = type(PolicyConfig().vision_language)(**sizes)
    return PolicyConfig(
        **{
            "name": "flow_action",
            "observation_size": 5,
            "action": continuous(SIZE),
            "action_size": SIZE,
            "action_chunk": EXECUTED,
            "hidden_sizes": (8,),
            **own,
            **fields,
        }
    )


def trainer_config(
    noise: str = "network", trunk: str = "numbers", *, minibatch_size: int = 32, **fields: Any
) -> EmbodiedTrainerConfig:
    """Updates of everything that a rank has."""
    ppo: dict[str, Any] = {"epochs": 2, "normalize_advantage": "batch", "log_prob_level": "token"}
    ppo |= fields.pop("ppo", {})
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(
            policy=config(noise, trunk), optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1.0)
        ),
        ppo=PPOConfig(minibatch_size=minibatch_size, **ppo),
        advantage=AdvantageConfig(**fields.pop("advantage", {})),
        cloning=CloningConfig(**fields),
    )


LOSS = LossConfig(entropy_coefficient=0.01)


def observations(spec: ObservationSpec, count: int, seed: int = 0) -> ObservationArray:
    drawn = np.random.default_rng(seed)
    seen = spec.empty(count)
    for part in spec.parts:
        place = seen if seen.dtype.names is None else seen[part.name]
        shape = place.shape
        place[...] = (
            drawn.normal(size=shape) if part.kind == "state" else drawn.integers(97, 122, shape)
        )
    return seen


def trajectory(
    policy: PolicyConfig,
    stage: int,
    *,
    steps: int = 4,
    envs: int = 4,
    cut: bool = True,
    seen: ObservationArray | None = None,
) -> Trajectory:
    """What a stage collected by a policy of the first weights, with episodes that end within
    chunks where ``cut``; of ``seen [steps, envs, ...]``, or of any observations."""
    drawn = np.random.default_rng(stage)
    torch.manual_seed(0)
    server = PolicyServer(policy, seed=stage)
    if seen is None:
        seen = observations(policy.sees, steps * envs, seed=stage)
        seen = seen.reshape(steps, envs, *extra(policy))
    chunk = policy.action_chunk
    answers = [server.act(rows) for rows in seen]
    ended = (drawn.random((steps, envs)) < 0.3) & cut
    count = np.where(ended, drawn.integers(1, chunk + 1, (steps, envs)), chunk)
    executed = np.arange(chunk) < count[..., None]
    reward = np.where(executed, drawn.normal(size=executed.shape), 0.0).astype(np.float32)
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=stage,
        observation=seen,
        action=np.stack([one.action for one in answers]),
        log_prob=np.stack([one.log_prob for one in answers]),
        value=np.stack([*(one.value for one in answers), answers[0].value]),
        reward=reward.sum(-1),
        terminated=ended & (drawn.random((steps, envs)) < 0.5),
        truncated=ended,
        final_value=np.where(ended, 0.3, 0.0).astype(np.float32),
        version=np.zeros(steps, np.int64),
        action_reward=reward,
        executed=executed,
        chain=np.stack([one.chain for one in answers if one.chain is not None]),
    )


def extra(policy: PolicyConfig) -> tuple[int, ...]:
    """Dimensions behind those of steps and environments."""
    return (policy.observation_size,) if policy.sees.flat else ()
