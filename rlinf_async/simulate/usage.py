"""Device-seconds by role: held and busy."""

from __future__ import annotations

import asyncio

import msgspec

from rlinf_async.backends.cost.engine import CostEngine


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Who held and used how many devices from a time on."""

    time: float
    held: dict[str, int]
    busy: dict[str, int]
    left: int
    """samples of the iteration that are not generated"""


class Usage:
    """Integrals over virtual time of how many devices each role holds, and has busy."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._loop = asyncio.get_running_loop()
        self._began = self._at = self._loop.time()
        self._held: dict[str, int] = {}
        self.held: dict[str, float] = {}
        """device-seconds, by role"""
        self.busy: dict[str, float] = {}
        """device-seconds, by role"""
        self.spent: dict[str, float] = {}
        """device-seconds, by cause"""
        self.history: list[Moment] = []

    def note(self, busy: dict[str, int], left: int) -> None:
        """Add the present moment to the history."""
        moment = Moment(
            time=self._loop.time() - self._began, held=dict(self._held), busy=busy, left=left
        )
        self.history.append(moment)

    def restart(self) -> None:
        """Begin here: forget all device-seconds so far."""
        self._began = self._at = self._loop.time()
        self.held, self.busy, self.spent = {}, {}, {}

    def holds(self, **devices: int) -> None:
        """Note how many devices each role holds from now on."""
        now = self._loop.time()
        for role, count in self._held.items():
            self.held[role] = self.held.get(role, 0.0) + count * (now - self._at)
        self._at = now
        self._held = self._held | devices

    def worked(self, role: str, device_seconds: float) -> None:
        """Note that devices were busy."""
        self.busy[role] = self.busy.get(role, 0.0) + device_seconds

    def spend(self, cause: str, device_seconds: float) -> None:
        """Note what device-seconds were spent on."""
        self.spent[cause] = self.spent.get(cause, 0.0) + device_seconds

    def spent_by(self, engine: CostEngine) -> None:
        """Note what an engine has spent since the last time."""
        for cause, seconds in engine.take_spent().items():
            self.spend(cause, seconds)
            if cause == "decoding":
                self.worked("rollout", seconds)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._loop.time() - self._began

    def bubbles(self) -> dict[str, float]:
        """Return the share of the held device-seconds in which nothing was computed, by role; under
        ``cluster`` that of all devices, held or not."""
        self.holds()
        found = {
            role: 1.0 - min(1.0, self.busy.get(role, 0.0) / held)
            for role, held in sorted(self.held.items())
            if held > 0.0
        }
        everything = self.devices * self.seconds
        found["cluster"] = 1.0 - sum(self.busy.values()) / everything if everything else 0.0
        return found
