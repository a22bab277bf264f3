"""What knowing only the distribution of lengths is worth: a schedule in which all responses advance
alike.

::

    0    load     x1           x2            x3          T
    |     |--------|------------|-------------|----------|
    rollout   D       D - r1       D - r2      nothing
    actor            trains 1     trains 2    trains 3

Before a response ends nobody knows how long it will be, so there is no reason to have one advance
faster than another. Then a group is whole once its longest response is, and mini-batches arrive in
the order of `oracle`, but later: when nearly everything is generated. From one of these moments on
the actor has devices; which one, and the ranks of each mini-batch, are searched.

It pays for what `oracle` pays for. As there, moving responses costs nothing and instances have the
best width at any time, so what a policy loses beside it are moves and widths. It is no limit: some
groups could be put first before anything is known of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlinf_async.simulate.bound import token_costs
from rlinf_async.simulate.config import SimulationConfig
from rlinf_async.simulate.oracle import Oracle, Plans

Floats = NDArray[np.float64]


def all_alike(config: SimulationConfig, lengths: Sequence[Sequence[int]]) -> Oracle:
    """Return the seconds of the best schedule in which all responses advance alike; see the module.

    Args:
        config: of the simulation, on-policy: iterations do not overlap.
        lengths: response tokens of the samples of each iteration, group after group.

    Raises `ValueError` for one with ``max_staleness``.
    """
    if config.work.max_staleness:
        raise ValueError("work.max_staleness is above 0: iterations are planned one by one")
    found = [_Iteration(config, one).best() for one in lengths]
    return Oracle(seconds=sum(one for one, _ in found), ranks=[ranks for _, ranks in found])


class _Iteration:
    """One iteration. Its clock is ``x``, the tokens that every unfinished response has."""

    def __init__(self, config: SimulationConfig, lengths: Sequence[int]) -> None:
        self._config = config
        self._plans = Plans(config, lengths)
        self._arrives = [float(batch.max()) for batch in self._plans.batches]
        ordered = np.sort(np.asarray(lengths, np.float64))
        self._x = np.concatenate([[0.0], ordered])
        self._running = np.arange(len(ordered), 0, -1, dtype=np.float64)
        """responses between two of ``x``"""
        self._seconds, costs = token_costs(
            config.generation, hardware=config.hardware, samples=len(lengths)
        )
        self._per_device = self._seconds / costs
        """responses for each device with which a token takes ``_seconds``; rises with them"""
        self._clocks: dict[int, Floats] = {}

    def best(self) -> tuple[float, tuple[int, ...]]:
        """Return the least seconds, and the ranks of each mini-batch."""
        starts = range(len(self._arrives))
        return min(
            (self._whole(ranks, start), ranks)
            for ranks in self._plans.choices()
            for start in starts
        )

    def _whole(self, ranks: tuple[int, ...], start: int) -> float:
        """Return the seconds if the actor has devices once mini-batch ``start`` is there."""
        devices = self._config.shared_devices
        x = self._arrives[start]
        passed = self._until(x, 0.0, devices)
        trainings = self._plans.training(ranks)
        for (before, held), seconds, arrives in zip(
            pairwise((ranks[0], *ranks)), trainings, self._arrives, strict=True
        ):
            if arrives > x:
                passed += self._until(arrives, x, devices - before)
                x = arrives
            passed += seconds
            x = self._after(seconds, x, devices - held)
        return self._plans.overhead(ranks) + self._begin() + passed

    def _begin(self) -> float:
        """Return the seconds of all devices that prompts and lending the actor's devices take."""
        config = self._config
        moved = config.generation.move_seconds + config.actor.move_seconds
        spent = self._plans.prefill() + config.hardware.actor_devices * moved
        return spent / config.shared_devices

    def _until(self, target: float, x: float, devices: int) -> float:
        """Return the seconds from ``x`` to ``target`` tokens."""
        if devices <= 0:
            return float("inf")
        begin, end = np.interp([x, target], self._x, self._clock(devices))
        return float(end - begin)

    def _after(self, seconds: float, x: float, devices: int) -> float:
        """Return the tokens that there are so many seconds after ``x``."""
        if devices <= 0:
            return x
        clock = self._clock(devices)
        return float(np.interp(np.interp(x, self._x, clock) + seconds, clock, self._x))

    def _clock(self, devices: int) -> Floats:
        """Return the seconds at which each of ``x`` is reached on so many devices."""
        if devices not in self._clocks:
            each = self._running / devices
            token = np.interp(each, self._per_device, self._seconds)
            token *= np.maximum(1.0, each / self._per_device[-1])  # more than there are slots
            self._clocks[devices] = np.concatenate([[0.0], np.cumsum(token * np.diff(self._x))])
        return self._clocks[devices]
