"""Faults at times and places that follow from the seed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from rlinf_async.scheduling import ACTOR, instance_name
from rlinf_async.simulate.config import SimulationConfig

if TYPE_CHECKING:
    from rlinf_async.simulate.world import World


class Faults:
    """Makes engines crash and become slow, and hosts go away for a while."""

    def __init__(self, config: SimulationConfig, world: World) -> None:
        self._config, self._world = config.faults, world
        self._instances = config.shared_devices // config.hardware.instance_devices
        self._rng = np.random.default_rng((config.seed, 7))
        self.crashes = self.lost_hosts = self.slowed = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        config = self._config
        kinds = [
            (config.crash_every, self._crash),
            (config.slow_every, self._slow),
            (config.host_lost_every, self._lose_host),
        ]
        async with asyncio.TaskGroup() as group:
            for every, fault in kinds:
                if every > 0.0:
                    group.create_task(self._repeat(every, fault))

    async def _repeat(self, every: float, fault: object) -> None:
        while True:
            await asyncio.sleep(float(self._rng.exponential(every)))
            await fault()  # type: ignore[operator]

    async def _crash(self) -> None:
        """A serving engine dies; its worker builds it again."""
        serving = self._serving()
        if serving:
            number = serving[int(self._rng.integers(len(serving)))]
            engine = self._world.rollouts[number].engine
            self._world.usage.spent_by(engine)
            engine.die()
            self.crashes += 1

    async def _slow(self) -> None:
        serving = self._serving()
        if not serving:
            return
        engine = self._world.rollouts[serving[int(self._rng.integers(len(serving)))]].engine
        engine.change(slowness=self._config.slow_factor)
        self.slowed += 1
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.slow_seconds, lambda: engine.change(slowness=1.0))

    async def _lose_host(self) -> None:
        """Instances of a host without devices of the actor stop, and come back later."""
        world = self._world
        actors = {world.ledger.hosts[one] for one in world.ledger.held_by(ACTOR)}
        hosts = sorted(set(world.ledger.hosts.values()) - actors)
        if len(hosts) > 1:
            host = hosts[int(self._rng.integers(len(hosts)))]
            self.lost_hosts += await world.lose_host(host, self._config.host_seconds)

    def _serving(self) -> list[int]:
        held = {one.holder for one in self._world.ledger.holdings()}
        return [n for n in range(self._instances) if instance_name(n) in held]
