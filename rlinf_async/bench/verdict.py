"""Each bar's verdict: held, fell short, or not measured."""

from __future__ import annotations

import msgspec

from rlinf_async.bench.model import Bar
from rlinf_async.bench.results import Absence, Results

HELD = "held"
FELL_SHORT = "fell short"
NOT_MEASURED = "not measured"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one bar."""

    bar: str
    outcome: str
    """``held``, ``fell short`` or ``not measured``"""
    value: float | None = None
    target: float | None = None
    unit: str = ""
    at_most: bool = False
    reason: str = ""
    """Why there is no value."""


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
