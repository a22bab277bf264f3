"""Which placement and policy is best: every one that fits, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from rlinf_async.simulate.config import PolicyConfig, SimulationConfig, placements
from rlinf_async.simulate.run import Record, simulate


def with_policy(config: SimulationConfig, policy: str) -> SimulationConfig:
    """The same run under another policy."""
    scheduler = PolicyConfig(policy=policy, every=config.scheduler.every)
    return msgspec.structs.replace(config, scheduler=scheduler)


def candidates(config: SimulationConfig, policies: Sequence[str]) -> Iterator[SimulationConfig]:
    """Yield every number of actor devices, size of rollout instances and policy that fits."""
    hardware = config.hardware
    devices = hardware.devices
    for size in sorted({1, 2, 4, 8, hardware.instance_devices}):
        if size < hardware.instance_devices or size > hardware.devices_per_host:
            continue  # fewer devices would not hold the model
        try:
            resized = resize(config, size)
        except ValueError:  # the devices are no multiple of it
            continue
        for placed in placements(resized, devices):
            for policy in policies:
                yield with_policy(placed, policy)


def resize(config: SimulationConfig, size: int) -> SimulationConfig:
    """The same with instances of ``size`` devices: faster, and fewer. Raises `ValueError`."""
    hardware, generation = config.hardware, config.generation
    factor = size / hardware.instance_devices
    widths = tuple(
        sorted({int(width / factor) for width in hardware.instance_widths if width >= factor} | {1})
    )
    faster = factor**generation.wider
    return msgspec.structs.replace(
        config,
        hardware=msgspec.structs.replace(
            hardware,
            instance_devices=size,
            instance_widths=widths,
            actor_devices=max(size, hardware.actor_devices // size * size),
        ),
        generation=msgspec.structs.replace(
            generation,
            decode_seconds=generation.decode_seconds / faster,
            sequence_seconds=generation.sequence_seconds / faster,
            prefill_seconds=generation.prefill_seconds / faster,
            slots=max(1, round(generation.slots * factor)),
        ),
    )


def sweep(
    configs: Sequence[SimulationConfig], on_result: Callable[[SimulationConfig, Record], None]
) -> tuple[SimulationConfig, Record]:
    """Simulate all, and return the best by samples per device-hour. Raises `ValueError` if there
    are none."""
    best: tuple[SimulationConfig, Record] | None = None
    for config in configs:
        record = simulate(config)
        on_result(config, record)
        rate = record.result.samples_per_device_hour
        if best is None or rate > best[1].result.samples_per_device_hour:
            best = config, record
    if best is None:
        raise ValueError("no placement fits")
    return best
