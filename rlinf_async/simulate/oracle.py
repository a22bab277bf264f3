"""The schedule of somebody who knows every length: what policies can be held against.

::

    0    load      s1        s2        s3     ...  sn         T
    |     |--------|---------|---------|-----------|----------|
    rollout   D      D - r1    D - r2                 nothing
    actor           trains 1  trains 2              trains n

The ranks ``r1 <= ... <= rn`` of the mini-batches are searched; with them the times of training are
known from the end: as late as can be, one after the other. Groups are trained in the order of their
longest response. What is left is to give every sample a pace in each interval before its deadline,
so that no interval takes more device-seconds than it has. With the cost ``c`` of a token by its
seconds (see `bound`), which is convex, that is a convex problem, and Lagrange multipliers, a price
of each interval's device-seconds, decide whether it has a solution:

- a price under which all samples cost more than there is proves that there is none;
- the mean of the solutions under the prices tried is one, once it fits everywhere.

Prices follow the overuse of their intervals (multiplicative weights: Arora, Hazan, Kale, 2012). The
least ``T`` is found by bisection.

Between `at_best`, which no schedule beats, and what can be done: it pays for loading, prefill,
lending, resharding and uneven shares of ranks, but responses have any pace at any time, on any
fraction of a device, and move for nothing. So nobody should be expected to reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from rlinf_async.simulate.bound import token_costs
from rlinf_async.simulate.config import SimulationConfig

Floats = NDArray[np.float64]

TOLERANCE = 0.005
"""share of ``T``, and of an interval's device-seconds"""
TRIES = 400
"""prices that are tried before a ``T`` is taken to be impossible"""
BINS = 256
"""of the samples of a mini-batch, by length"""
POINTS = 16
"""of the cost of a token"""


@dataclass(frozen=True)
class Oracle:
    """What came of the search."""

    seconds: float
    """of all iterations"""
    ranks: list[tuple[int, ...]]
    """of the actor in each mini-batch, by iteration"""


def oracle(config: SimulationConfig, lengths: Sequence[Sequence[int]]) -> Oracle:
    """Return the seconds in which somebody who knows the lengths could have run it; see the module.

    Args:
        config: of the simulation, on-policy: iterations do not overlap.
        lengths: response tokens of the samples of each iteration, group after group.

    Raises `ValueError` for one with ``max_staleness``.
    """
    if config.work.max_staleness:
        raise ValueError("work.max_staleness is above 0: the oracle plans iterations one by one")
    found = [Plans(config, one).best() for one in lengths]
    return Oracle(seconds=sum(one for one, _ in found), ranks=[ranks for _, ranks in found])


class Plans:
    """The ranks that the actor can have in one iteration, what they cost, and the best of them.

    Args:
        config: of the simulation.
        lengths: response tokens of the samples of the iteration, group after group.
    """

    def __init__(self, config: SimulationConfig, lengths: Sequence[int]) -> None:
        self._config = config
        group, batches = config.work.group_size, config.work.mini_batches
        groups = np.asarray(lengths, np.float64).reshape(-1, group)
        groups = groups[np.argsort(groups.max(axis=1), kind="stable")]
        self.batches = np.split(groups, batches)
        self._lengths = [_binned(one.ravel()) for one in self.batches]
        seconds, costs = token_costs(
            config.generation, hardware=config.hardware, samples=len(lengths)
        )
        keep = np.unique(np.linspace(0, len(seconds) - 1, POINTS).round().astype(int))
        # From the slowest pace to the fastest: tokens in a second, device-seconds of them.
        self._tokens = 1.0 / seconds[keep][::-1]
        self._costs = costs[keep][::-1] * self._tokens
        self._tails: dict[tuple[int, int], float] = {}

    def best(self) -> tuple[float, tuple[int, ...]]:
        """Return the least seconds, and the ranks of each mini-batch."""
        least, chosen = np.inf, tuple[int, ...]()
        for ranks in self.choices():
            low = self.overhead(ranks) + sum(self.training(ranks))
            high = least if least < np.inf else self._ample(ranks)
            if least < np.inf and not self._possible(high * (1.0 - TOLERANCE), ranks):
                continue
            while high - low > TOLERANCE * high:
                middle = 0.5 * (low + high)
                low, high = (low, middle) if self._possible(middle, ranks) else (middle, high)
            if high < least:
                least, chosen = high, ranks
        return float(least), chosen

    def choices(self) -> Iterator[tuple[int, ...]]:
        """Ranks that do not fall: as much as can be for the last, when nobody generates."""
        config = self._config
        tp, batches = config.hardware.actor_tp, config.work.mini_batches
        sizes = [one * tp for one in config.dp_sizes if one * tp <= config.shared_devices]
        useful = [one for one in sizes if 8 * one >= config.shared_devices] or sizes
        for first in combinations_with_replacement(useful, batches - 1):
            yield (*first, sizes[-1])

    def _ample(self, ranks: tuple[int, ...]) -> float:
        high = 2.0 * (self.overhead(ranks) + sum(self.training(ranks)) + 1.0)
        while not self._possible(high, ranks):
            high *= 2.0
        return high

    # -- seconds ------------------------------------------------------------------------------

    def training(self, ranks: tuple[int, ...]) -> list[float]:
        """Return the seconds of each mini-batch, with the change of the ranks before it."""
        actor, home = self._config.actor, self._config.hardware.actor_devices
        found = []
        for number, (before, now) in enumerate(pairwise((home, *ranks))):
            change = actor.move_seconds if not number else 0.0
            change += actor.rescale_seconds if now != before else 0.0
            found.append(change + self._busiest(number, now) + actor.step_seconds)
        return found

    def _busiest(self, number: int, ranks: int) -> float:
        """Return the seconds of the rank with the most tokens, as groups are handed out."""
        if (number, ranks) not in self._tails:
            config = self._config
            groups = self.batches[number].sum(axis=1)
            groups = np.sort(groups + config.work.prompt_tokens * config.work.group_size)[::-1]
            tp = config.hardware.actor_tp
            shares = [0.0] * (ranks // tp)
            room = [len(groups) // len(shares)] * len(shares)
            for tokens in groups:
                one = min((at for at, left in enumerate(room) if left), key=shares.__getitem__)
                shares[one] += float(tokens)
                room[one] -= 1
            samples = len(groups) // len(shares) * config.work.group_size
            seconds = max(shares) * config.actor.token_seconds / tp
            self._tails[number, ranks] = seconds + samples * config.actor.sample_seconds
        return self._tails[number, ranks]

    def overhead(self, ranks: tuple[int, ...]) -> float:
        """Return the seconds before the first token and after the last mini-batch."""
        config = self._config
        generation, actor = config.generation, config.actor
        home = actor.rescale_seconds if ranks[-1] != config.hardware.actor_devices else 0.0
        prefill = config.work.prompt_tokens * generation.prefill_seconds
        begin = generation.load_seconds + prefill + config.env.seconds
        return begin + home + generation.move_seconds + actor.publish_seconds

    # -- whether a time is possible -----------------------------------------------------------

    def _possible(self, whole: float, ranks: tuple[int, ...]) -> bool:
        config = self._config
        training = self.training(ranks)
        first = whole - self.overhead(ranks) - sum(training)
        spans = np.asarray([first, *training[:-1]])
        devices = config.shared_devices - np.asarray([0, *ranks[:-1]], np.float64)
        room = devices * spans
        moved = config.generation.move_seconds + config.actor.move_seconds
        room[0] -= config.hardware.actor_devices * moved
        room[0] -= self.prefill()
        spans[room <= 0.0] = 0.0
        if first <= 0.0 or room[0] <= 0.0:
            return False
        prices = np.ones(len(room))
        used_before = np.zeros(len(room))
        for tried in range(1, TRIES + 1):
            used = self._use(prices, spans)
            if used is None or float(prices @ (used - np.maximum(room, 0.0))) > 0.0:
                return False
            used_before += used
            over = used_before / tried - np.maximum(room, 0.0)
            if bool(np.all(over <= TOLERANCE * np.maximum(room, 1.0))):
                return True
            step = 0.5 / np.sqrt(tried)
            prices *= np.exp(step * np.clip(used / np.maximum(room, 1.0) - 1.0, -2.0, 2.0))
            prices /= prices.max()
        return False

    def prefill(self) -> float:
        config = self._config
        tokens = config.samples * config.work.prompt_tokens
        return tokens * config.generation.prefill_seconds * config.hardware.instance_devices

    def _use(self, prices: Floats, spans: Floats) -> Floats | None:
        """Return the device-seconds of each interval if all samples pay as little as they can; None
        where one cannot be made in time."""
        used = np.zeros(len(spans))
        tokens = np.diff(self._tokens, prepend=0.0)  # of a second, that each faster pace adds
        costs = np.diff(self._costs, prepend=0.0)
        for number, lengths in enumerate(self._lengths):
            open_until = number + 1
            more = np.outer(spans[:open_until], tokens).ravel()
            paid = np.outer(spans[:open_until], costs).ravel()
            slope = np.outer(prices[:open_until], costs / tokens).ravel()
            order = np.argsort(slope, kind="stable")
            reach = np.concatenate([[0.0], np.cumsum(more[order])])
            if float(lengths[-1]) > reach[-1]:
                return None
            where = np.repeat(np.arange(open_until), len(tokens))[order]
            each = self.batches[number].size / len(lengths)
            for interval in range(open_until):
                cost = np.where(where == interval, paid[order], 0.0)
                cost = np.concatenate([[0.0], np.cumsum(cost)])
                used[interval] += each * float(np.interp(lengths, reach, cost).sum())
        return used


def _binned(lengths: Floats) -> Floats:
    """Return means of equally many lengths each, rising."""
    ordered = np.sort(lengths)
    if len(ordered) <= BINS:
        return ordered
    return np.asarray([part.mean() for part in np.array_split(ordered, BINS)])
