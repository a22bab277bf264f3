"""At every moment one span is in the foreground, so that times add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.observe.trace import ForegroundPeriod, Span, busy, foreground


def test_an_inner_span_covers_the_outer_one_while_it_lasts() -> None:
    pieces = foreground([Span("a", "train", 0, 100), Span("a", "publish", 40, 20)])
    assert pieces == [
        ForegroundPeriod(0, 40, "train", False),
        ForegroundPeriod(40, 60, "publish", False),
        ForegroundPeriod(60, 100, "train", False),
    ]


def test_a_wait_never_covers_work() -> None:
    pieces = foreground([Span("a", "step", 0, 50), Span("a", "wait actions", 20, 60)])
    assert pieces == [
        ForegroundPeriod(0, 50, "step", False),
        ForegroundPeriod(50, 80, "wait actions", True),
    ]


def test_a_worker_is_idle_where_it_waits_and_where_it_records_nothing() -> None:
    pieces = foreground([Span("a", "step", 0, 30), Span("a", "wait actions", 30, 20)])
    summed = busy("a", pieces, 100)
    assert summed.seconds_by_name == {"step": 30e-9}
    assert summed.idle_share == pytest.approx(0.7)


def test_a_worker_over_no_time_at_all_is_not_idle() -> None:
    assert busy("a", [], 0).idle_share == 0.0


spans = st.lists(
    st.builds(
        Span,
        st.just("a"),
        st.sampled_from(["x", "y", "wait z"]),
        st.integers(0, 40),
        st.integers(0, 15),
    ),
    max_size=20,
)


@given(spans)
def test_the_pieces_are_those_of_a_count_moment_by_moment(spans: list[Span]) -> None:
    def owner(moment: int) -> str | None:
        started = enumerate(sorted(spans, key=lambda span: span.start))
        now = [(not s.waiting, i, s.name) for i, s in started if s.start <= moment < s.end]
        return max(now)[2] if now else None

    def piece(moment: int) -> str | None:
        names = [p.name for p in foreground(spans) if p.start <= moment < p.end]
        assert len(names) <= 1
        return names[0] if names else None

    assert [piece(moment) for moment in range(60)] == [owner(moment) for moment in range(60)]
