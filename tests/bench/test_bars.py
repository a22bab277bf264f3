"""Bars over medians, and what is left of a bench when only some cases are asked for."""

from __future__ import annotations

import pytest

from benchmarks.harness import Bar, Results, best_of, bound, quotient
from benchmarks.harness.model import judge, selected
from tests.bench.conftest import printing, versus


def measured(**cases: float) -> Results:
    """Each case has printed this ``time`` once."""
    results = Results()
    for case, time in cases.items():
        results.add(case, {"time": time})
    return results


def held(bar: Bar, results: Results) -> bool:
    return judge(bar, results).outcome == "held"


def test_a_quotient_may_be_bounded_from_above() -> None:
    bar = quotient("ours / limit", ("ours", "time"), ("limit", "time"), at_most=2.5)
    assert held(bar, measured(ours=25, limit=10))
    assert not held(bar, measured(ours=26, limit=10))


def test_a_quotient_of_two_numbers_of_one_case_needs_that_case_alone() -> None:
    results = Results()
    results.add("ours", {"p99": 30, "p50": 10})
    bar = quotient("p99 / p50", ("ours", "p99"), ("ours", "p50"), at_least=3)
    assert bar.cases == ("ours",)
    assert held(bar, results)


def test_the_best_of_the_others_counts() -> None:
    bar = best_of("best", metric="time", ours="ours", theirs=("one", "other"), at_least=1)
    assert held(bar, measured(ours=20, one=5, other=20))
    assert not held(bar, measured(ours=20, one=21, other=5))


def test_a_bound_is_on_one_number() -> None:
    bar = bound("growth", ("ours", "time"), at_most=1.05)
    assert held(bar, measured(ours=1.05))
    assert not held(bar, measured(ours=1.06))


@pytest.mark.parametrize(("at_least", "at_most"), [(None, None), (1.0, 2.0)])
def test_a_bar_with_no_target_or_two_is_refused(
    at_least: float | None, at_most: float | None
) -> None:
    with pytest.raises(ValueError, match="bar 'growth': give at_least or at_most, not both"):
        bound("growth", ("ours", "time"), at_least=at_least, at_most=at_most)


def test_a_selection_keeps_the_bars_that_its_cases_suffice_for() -> None:
    bench = versus(printing("ours", ""), printing("theirs", ""))
    both = selected(bench, ["OURS", "their"])
    assert [case.name for case in both.cases] == ["ours", "theirs"]
    assert both.bars == bench.bars
    alone = selected(bench, ["ours"])
    assert [case.name for case in alone.cases] == ["ours"]
    assert alone.bars == ()


def test_a_selection_that_names_no_case_is_refused_with_the_cases_there_are() -> None:
    bench = versus(printing("ours", ""), printing("theirs", ""))
    with pytest.raises(ValueError, match=r"no case of 'small' has 'zmq'.*'ours', 'theirs'"):
        selected(bench, ["ours", "zmq"])
