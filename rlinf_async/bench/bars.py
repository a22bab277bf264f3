"""Ways to say what must be reached: quotients of medians, and bounds on one."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_async.bench.model import Bar
from rlinf_async.bench.results import Results

Metric = tuple[str, str]
"""A case's name and the name of a number that it prints."""


def ratio(name: str, *, metric: str, ours: str, theirs: str, at_least: float) -> Bar:
    """The bar "our median is at least so many times theirs"."""
    return quotient(name, (ours, metric), (theirs, metric), at_least=at_least)


def quotient(
    name: str,
    over: Metric,
    under: Metric,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Bar:
    """The bar on one median by another. Exactly one of the two targets is given.

    Raises:
        ValueError: none is, or both.
    """
    target = _the_one(name, at_least, at_most)
    return Bar(
        name=name,
        cases=tuple(dict.fromkeys((over[0], under[0]))),
        value=lambda results: results.median(*over) / results.median(*under),
        target=lambda _: target,
        unit="x",
        at_most=at_most is not None,
    )


def best_of(name: str, *, metric: str, ours: str, theirs: Sequence[str], at_least: float) -> Bar:
    """The bar "our median is at least so many times the best of theirs"."""

    def value(results: Results) -> float:
        return results.median(ours, metric) / max(results.median(one, metric) for one in theirs)

    return Bar(name=name, cases=(ours, *theirs), value=value, target=lambda _: at_least, unit="x")


def bound(
    name: str,
    metric: Metric,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "",
) -> Bar:
    """The bar on one median by itself. Exactly one of the two targets is given.

    Raises:
        ValueError: none is, or both.
    """
    target = _the_one(name, at_least, at_most)
    return Bar(
        name=name,
        cases=(metric[0],),
        value=lambda results: results.median(*metric),
        target=lambda _: target,
        unit=unit,
        at_most=at_most is not None,
    )


def _the_one(name: str, at_least: float | None, at_most: float | None) -> float:
    given = [target for target in (at_least, at_most) if target is not None]
    if len(given) != 1:
        raise ValueError(f"bar {name!r}: give at_least or at_most, not both")
    return given[0]
