"""Bounds of numbers in settings."""

from __future__ import annotations

from operator import ge, gt, le, lt
from typing import Final

import msgspec

MOST_WORKERS: Final = 4_096
"""workers of a role, few enough to go through before a run"""
MOST_THREADS: Final = 4_096
"""most threads of the arithmetic in a process: more than any host has cores"""


def check_bounds(
    config: msgspec.Struct,
    *names: str,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise `ValueError` for the first of these fields that is out of bounds, or NaN.

    A field that is None was left out, and is not looked at.
    """
    bounds = (
        ("above", above, gt),
        ("at least", least, ge),
        ("at most", most, le),
        ("below", below, lt),
    )
    for name in names:
        value = getattr(config, name)
        for word, bound, holds in bounds:
            if value is None or bound is None or holds(value, bound):
                continue
            fields = {field.name: field.default for field in msgspec.structs.fields(config)}
            optional = ", or left out" if fields[name] is None else ""
            raise ValueError(f"{name} is {value}; it must be {word} {bound:g}{optional}")


def check_between(config: msgspec.Struct, *names: str, low: float = 0.0, high: float = 1.0) -> None:
    """Raise `ValueError` for the first of these fields that is not in this range, or is NaN."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must lie between {low:g} and {high:g}")
