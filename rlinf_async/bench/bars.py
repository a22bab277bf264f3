"""Bars: bounds on medians and on quotients of medians, and the verdict on each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rlinf_async.bench.model import Bar
from rlinf_async.bench.results import Absence, Results

Metric = tuple[str, str]
"""A case's name and the name of a number that it prints."""

HELD = "held"
FELL_SHORT = "fell short"
NOT_MEASURED = "not measured"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one bar."""

    bar: str
    outcome: str
    """``held``, ``fell short`` or ``not measured``"""
    value: float | None = None
    target: float | None = None
    unit: str = ""
    at_most: bool = False
    reason: str = ""
    """Why there is no value."""


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
        ValueError: neither is given, or both are.
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
        ValueError: neither is given, or both are.
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


def judge(bar: Bar, results: Results) -> Verdict:
    """The verdict on a bar. A case that should have run and did not makes it fall short."""
    gaps = [(case, results.gaps[case]) for case in bar.cases if case in results.gaps]
    harmless = (Absence.NOT_ASKED, Absence.SKIPPED)
    broken = [(case, gap) for case, gap in gaps if gap.absence not in harmless]
    if broken:
        return _without_value(bar, FELL_SHORT, broken[0])
    if gaps:
        return _without_value(bar, NOT_MEASURED, gaps[0])
    try:
        value, target = bar.value(results), bar.target(results)
    except (KeyError, ZeroDivisionError) as error:
        return Verdict(bar=bar.name, outcome=FELL_SHORT, reason=str(error))
    return Verdict(
        bar=bar.name,
        outcome=HELD if bar.held(value, target) else FELL_SHORT,
        value=value,
        target=target,
        unit=bar.unit,
        at_most=bar.at_most,
    )


def _without_value(bar: Bar, outcome: str, gap: tuple[str, object]) -> Verdict:
    case, why = gap
    return Verdict(bar=bar.name, outcome=outcome, reason=f"{case}: {why}")
