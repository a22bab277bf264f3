"""Faults at times and places that follow from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from rlinf_async.scheduling import ACTOR, instance_name
from rlinf_async.simulate.config import SimulationConfig
from rlinf_async.simulate.site import Site
from rlinf_async.workers.scheduler import DevicesReport


class Faults:
    """Makes engines crash and become slow, and hosts go away for a while.

    Args:
        config: of the simulation.
        site: of the engines.
        tell: tells the scheduler of hosts, as whoever watches them does.
    """

    def __init__(
        self,
        config: SimulationConfig,
        site: Site,
        tell: Callable[[DevicesReport], Awaitable[None]],
    ) -> None:
        self._config, self._site, self._tell = config.faults, site, tell
        self._instances = config.shared_devices // config.hardware.instance_devices
        self._rng = np.random.default_rng((config.seed, 7))
        self.crashes = self.lost_hosts = self.slowed = 0
        self._returning: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            await self._all()
        finally:
            for one in self._returning:
                one.cancel()

    async def _all(self) -> None:
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
            engine = self._site.rollouts[number].engine
            self._site.usage.spent_by(engine)
            engine.die()
            self.crashes += 1

    async def _slow(self) -> None:
        serving = self._serving()
        if not serving:
            return
        engine = self._site.rollouts[serving[int(self._rng.integers(len(serving)))]].engine
        engine.change(slowness=self._config.slow_factor)
        self.slowed += 1
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.slow_seconds, lambda: engine.change(slowness=1.0))

    async def _lose_host(self) -> None:
        """Instances of a host stop, and what they have made is lost; the host comes back later.
        Not one with devices of the actor, and not the last."""
        ledger, homes = self._site.ledger, self._site.topology.instances
        actors = {ledger.hosts[one] for one in ledger.held_by(ACTOR)}
        there = sorted(set(ledger.hosts.values()) - actors)
        if len(there) < 2:
            return
        host = there[int(self._rng.integers(len(there)))]
        devices = tuple(one for one, where in ledger.hosts.items() if where == host)
        serving = self._serving()
        lost = [n for n in serving if not set(devices).isdisjoint(homes[n])]
        if set(devices) & set(ledger.lost) or len(lost) == len(serving):
            return
        for number in lost:
            self._site.rollouts[number].engine.forget()
        self.lost_hosts += 1
        await self._tell(DevicesReport(lost=devices))
        self._returning.append(asyncio.create_task(self._back(devices)))

    async def _back(self, devices: tuple[int, ...]) -> None:
        await asyncio.sleep(self._config.host_seconds)
        await self._tell(DevicesReport(found=devices))

    def _serving(self) -> list[int]:
        held = {one.holder for one in self._site.ledger.holdings()}
        return [n for n in range(self._instances) if instance_name(n) in held]
