"""Priorities of the transitions of a store, and drawing in proportion to them.

Source: Schaul et al. 2016, "Prioritized Experience Replay", sections 3.3 and 3.4: probabilities
``p^alpha / sum``, weights ``(N P)^-beta`` divided by the largest of the batch; a new transition has
the largest priority that there is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from rlinf_async.messages.embodied import Floats, Ints
from rlinf_async.workers.replay.store import ReplayStore
from rlinf_async.workers.replay.sum_tree import SumTree

LEAST: Final = 1e-6
"""added to errors: no transition is never drawn again"""


class Priorities:
    """The column ``priority`` of a store, and a sum tree of its powers over the slots."""

    def __init__(self, store: ReplayStore, alpha: float) -> None:
        self._store, self._alpha = store, alpha
        self._tree = SumTree(store.slots)
        if len(store):
            slots = store.slots_of(store.numbers)
            self._tree.set(slots, self._powers(store.arrays["priority"][slots]))

    def added(self, numbers: Ints, left: Ints) -> None:
        """Take in new transitions, which have entered the window; ``left`` have left it."""
        store = self._store
        self._tree.set(store.slots_of(left), np.zeros(len(left)))
        slots = store.slots_of(numbers)
        others = store.slots_of(np.arange(store.first, numbers[0] if len(numbers) else store.first))
        largest = float(store.arrays["priority"][others].max()) if len(others) else 1.0
        store.arrays["priority"][slots] = largest
        self._tree.set(slots, np.full(len(slots), self._powers(np.array(largest))))

    def update(self, numbers: Ints, errors: Floats) -> None:
        """Give transitions the priorities of their last errors, unless they have left."""
        there = (numbers >= self._store.first) & (numbers < self._store.count)
        slots = self._store.slots_of(numbers[there])
        priority = np.abs(errors[there]) + np.float32(LEAST)
        self._store.arrays["priority"][slots] = priority
        self._tree.set(slots, self._powers(priority))

    def draw(self, random: np.random.Generator, size: int, beta: float) -> tuple[Ints, Floats]:
        """Draw ``size`` transitions; return their numbers and weights.

        One from each of so many equal ranges of the cumulative probability.
        """
        store, total = self._store, self._tree.total
        slots = self._tree.find((np.arange(size) + random.random(size)) * (total / size))
        probability = self._tree.get(slots) / total
        weight = (len(store) * probability) ** -beta
        newest = store.count - 1
        numbers = newest - (newest - slots) % store.slots
        return numbers, (weight / weight.max()).astype(np.float32)

    def _powers(self, priority: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        powers: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (
            priority.astype(np.float64) ** self._alpha
        )
        return powers
