"""What a simulation is of: hardware, work, costs, policy, faults. Read from TOML."""

from __future__ import annotations

import msgspec

from rlinf_async.backends.cost.config import (
    CostEngineConfig,
    CostTrainerConfig,
    EnvCostConfig,
    EpisodeCostConfig,
    InferenceCostConfig,
)
from rlinf_async.config.counts import check_bounds
from rlinf_async.parallel import valid_dp_sizes


class WorkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reinforcement learning that is simulated."""

    iterations: int = 4
    prompts_per_device: float = 8.0
    """prompts of an iteration for each device of the cluster"""
    group_size: int = 16
    mini_batches: int = 4
    """mini-batches of an iteration, with an optimizer step each"""
    max_staleness: int = 0
    prompt_tokens: int = 300
    pipelined: bool = False
    """the actor trains groups while others of their mini-batch are generated, as runs do"""

    def __post_init__(self) -> None:
        check_bounds(self, "iterations", "group_size", "mini_batches", "prompt_tokens", least=1)
        check_bounds(self, "prompts_per_device", above=0)
        check_bounds(self, "max_staleness", least=0)


class HardwareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster."""

    devices: int = 32
    devices_per_host: int = 8
    instance_devices: int = 1
    """devices of a rollout instance at home: its tensor-parallel size"""
    instance_widths: tuple[int, ...] = (1, 2, 4, 8)
    """devices that an instance can serve on, over those at home"""
    actor_devices: int = 16
    """devices of the actor at home; the other devices are rollout's"""
    actor_tp: int = 1
    """tensor-parallel size of the actor, of every strategy"""
    price: float = 2.0
    """price of a device for an hour, in any currency"""

    def __post_init__(self) -> None:
        check_bounds(self, "devices", "devices_per_host", "instance_devices", "actor_tp", least=1)
        if not 0 < self.actor_devices < self.devices:
            raise ValueError(
                f"actor_devices is {self.actor_devices}; with {self.devices} devices it must be "
                f"1 to {self.devices - 1}, so that both actor and rollout have one"
            )
        for name in ("actor_devices", "devices"):
            if getattr(self, name) % self.instance_devices:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of instance_devices "
                    f"= {self.instance_devices}"
                )
        if self.actor_devices % self.actor_tp:
            raise ValueError(
                f"actor_devices is {self.actor_devices}; it must be a multiple of actor_tp = "
                f"{self.actor_tp}"
            )


class ScalingPolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling policy, and how often it is asked."""

    policy: str = "tail"
    every: float = 0.02
    """share of an iteration's samples after which the policy is asked again"""

    def __post_init__(self) -> None:
        check_bounds(self, "every", above=0, most=1)


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean seconds between faults, of the whole cluster; 0: none. Times and places by the seed."""

    crash_every: float = 0.0
    """an engine dies, and is built again; its tokens are lost"""
    slow_every: float = 0.0
    """an instance becomes slower"""
    slow_factor: float = 3.0
    slow_seconds: float = 300.0
    host_lost_every: float = 0.0
    """all instances of a host stop, and what they have made is lost"""
    host_seconds: float = 600.0
    """seconds until a lost host is back"""

    def __post_init__(self) -> None:
        check_bounds(self, "crash_every", "slow_every", "host_lost_every", "slow_seconds", least=0)
        check_bounds(self, "slow_factor", least=1)


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated run."""

    generation: CostEngineConfig
    actor: CostTrainerConfig
    name: str = "simulation"
    seed: int = 0
    work: WorkConfig = WorkConfig()
    hardware: HardwareConfig = HardwareConfig()
    inference: InferenceCostConfig = InferenceCostConfig()
    env: EnvCostConfig = EnvCostConfig()
    episode: EpisodeCostConfig = EpisodeCostConfig()
    scheduler: ScalingPolicyConfig = ScalingPolicyConfig()
    faults: FaultConfig = FaultConfig()

    def __post_init__(self) -> None:
        shared, size = self.shared_devices, self.hardware.instance_devices
        if shared <= self.hardware.actor_devices or shared % size:
            raise ValueError(
                f"inference.devices is {self.inference.devices}; of {self.hardware.devices} "
                f"devices it has to leave a multiple of hardware.instance_devices = {size}, and "
                f"more than hardware.actor_devices = {self.hardware.actor_devices}"
            )
        home = self.hardware.actor_devices // self.hardware.actor_tp
        if home not in self.dp_sizes:
            raise ValueError(
                f"hardware.actor_devices = {self.hardware.actor_devices} gives the actor a "
                f"data-parallel size of {home}, which cannot share a mini-batch of "
                f"{self.mini_batch} samples in groups of {self.work.group_size}; sizes that can: "
                f"{self.dp_sizes}"
            )

    @property
    def shared_devices(self) -> int:
        """Devices of actor and rollout, the first ones; the others are those of inference."""
        return self.hardware.devices - self.inference.devices

    @property
    def prompts(self) -> int:
        """Prompts of an iteration: a multiple of the mini-batches."""
        wanted = self.work.prompts_per_device * self.hardware.devices
        return max(1, round(wanted / self.work.mini_batches)) * self.work.mini_batches

    @property
    def samples(self) -> int:
        """Samples of an iteration."""
        return self.prompts * self.work.group_size

    @property
    def mini_batch(self) -> int:
        """Samples of a mini-batch."""
        return self.samples // self.work.mini_batches

    @property
    def mean_tokens(self) -> float:
        """Return the mean tokens of a sample, with its prompt."""
        turns, answer = self.episode.mean_turns, float(self.generation.lengths.many(4096, 1).mean())
        given = (turns - 1.0) * self.episode.given_tokens
        return self.work.prompt_tokens + turns * answer + given

    @property
    def dp_sizes(self) -> list[int]:
        """Data-parallel sizes that the actor can have."""
        most = self.shared_devices // self.hardware.actor_tp
        return valid_dp_sizes(self.mini_batch, group_size=self.work.group_size, at_most=most)


def on_devices(config: SimulationConfig, devices: int) -> SimulationConfig:
    """Return the same simulation on another number of devices, of which the actor has nearly the
    same share.

    Raises `ValueError` where no share fits.
    """
    old = config.hardware
    share = old.actor_devices / old.devices
    fitting = placements(config, devices)
    if not fitting:
        raise ValueError(f"no number of actor devices fits {devices} devices")
    return min(fitting, key=lambda one: abs(one.hardware.actor_devices / devices - share))


def placements(config: SimulationConfig, devices: int) -> list[SimulationConfig]:
    """Return a simulation on ``devices`` for each valid number of actor devices."""
    found = []
    unit = max(config.hardware.instance_devices, config.hardware.actor_tp)
    for count in range(unit, devices, unit):
        try:
            hardware = msgspec.structs.replace(
                config.hardware, devices=devices, actor_devices=count
            )
            found.append(msgspec.structs.replace(config, hardware=hardware))
        except ValueError:  # it does not divide the mini-batch
            continue
    return found
