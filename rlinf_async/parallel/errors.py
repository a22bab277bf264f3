"""Errors about a strategy, a model or a pair of layouts.

::

    ParallelError
     +-- StrategyError    the strategy does not fit the model or the ranks: names what would
     +-- ModelMismatch    two layouts, or a layout and a live model, disagree about the tensors
     +-- NotHeld          the new layout needs elements that no rank of the old one holds
     +-- PlanTooLarge     more moves than a plan may have
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Final

UNEVEN: Final = "; or stage_layers="
"""in a line about layers, before the counts that would fit"""


class ParallelError(Exception):
    """Root of the errors about layouts and plans."""


class StrategyError(ParallelError, ValueError):
    """The strategy does not fit. ``faults`` has one line for each misfit."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


class ModelMismatch(ParallelError, ValueError):
    """Names, shapes or dtypes of tensors are not those that were expected."""


class NotHeld(ParallelError, ValueError):
    """Elements that the new layout needs are on no rank of the old one."""


class PlanTooLarge(ParallelError, ValueError):
    """The plan would have too many moves to be worth making."""


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Return ``"; nearest: 'a', 'b'"``, or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(names), 2, 0.6)
    return "; nearest: " + ", ".join(map(repr, near)) if near else ""


def nearest_divisors(value: int, *numbers: int) -> str:
    """Return the common divisors next to ``value``: ``"2 or 4"``."""
    common = math.gcd(*numbers)
    return nearest(value, [part for part in range(1, common + 1) if common % part == 0])


def nearest(value: int, fitting: Iterable[int]) -> str:
    """Return those of ``fitting``, which are in order, that are next to ``value``: ``"2 or 4"``."""
    known = list(fitting)
    below = [one for one in known if one < value][-1:]
    above = [one for one in known if one > value][:1]
    return " or ".join(map(str, below + above))
