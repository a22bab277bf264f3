"""Limits of whole numbers in settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

MOST_WORKERS: Final = 4_096
"""workers of a role, few enough to go through before a run"""
MOST_THREADS: Final = 4_096
"""of the arithmetic in a process: more than any host has cores"""


def check_counts(
    config: msgspec.Struct, *, least: int, names: Sequence[str], most: float = math.inf
) -> None:
    """Raise `ValueError` for the first of these fields that is below ``least`` or above ``most``;
    None is neither."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
        if value > most:
            raise ValueError(f"{name} is {value}; it must be at most {most:.0f}")


def near_divisors(number: int, wanted: int) -> str:
    """Return the divisors of ``number`` next to a wanted one, as an error names them."""
    divisors = [one for one in range(1, number + 1) if number % one == 0]
    below = [one for one in divisors if one < wanted][-1:]
    above = [one for one in divisors if one > wanted][:1]
    return " or ".join(str(one) for one in below + above)
