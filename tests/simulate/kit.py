"""Small simulations."""

from __future__ import annotations

from typing import Any

import msgspec

from rlinf_async.backends.cost.config import CostEngineConfig, CostTrainerConfig, LogNormal
from rlinf_async.simulate import SimulationConfig
from rlinf_async.simulate.config import FaultConfig, HardwareConfig, ScalingPolicyConfig, WorkConfig

SMALL = SimulationConfig(
    generation=CostEngineConfig(
        decode_seconds=0.0075,
        sequence_seconds=0.00009,
        prefill_seconds=2e-5,
        load_seconds=1.0,
        move_seconds=1.0,
        slots=8,
        lengths=LogNormal(median=300.0, ratio=8.0, longest=2400),
    ),
    actor=CostTrainerConfig(
        token_seconds=3e-4, step_seconds=0.2, rescale_seconds=1.0, move_seconds=1.0
    ),
    work=WorkConfig(iterations=2, prompts_per_device=1.0, group_size=4, mini_batches=2),
    hardware=HardwareConfig(devices=8, devices_per_host=2, actor_devices=2),
)


def small(
    policy: str = "tail", *, seed: int = 0, faults: FaultConfig | None = None, **work: Any
) -> SimulationConfig:
    """Eight devices, two short iterations."""
    return msgspec.structs.replace(
        SMALL,
        seed=seed,
        scheduler=ScalingPolicyConfig(policy=policy, every=0.1),
        faults=faults or FaultConfig(),
        work=msgspec.structs.replace(SMALL.work, **work),
    )
