"""Clocks of other hosts: measured offsets, whatever the delays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.observe.trace import MEASUREMENTS_KEPT, PeerClock, Span

SECOND = 1_000_000_000
DELAYS = st.lists(
    st.tuples(st.integers(0, SECOND), st.integers(0, SECOND)), min_size=1, max_size=40
)


def measured(offset: int, delays: list[tuple[int, int]]) -> PeerClock:
    """A clock that was asked once for each pair of delays, there and back."""
    clock, now = PeerClock(), 10**15
    for there, back in delays:
        clock.measure(now, now + there + offset, now + there + back)
        now += there + back
    return clock


@given(st.integers(-(10**14), 10**14), DELAYS)
def test_the_true_offset_is_within_the_uncertainty(
    offset: int, delays: list[tuple[int, int]]
) -> None:
    clock = measured(offset, delays)
    kept = delays[-MEASUREMENTS_KEPT:]
    assert clock.uncertainty == min(there + back for there, back in kept) // 2
    if abs(offset) > SECOND:  # more than any delay could explain
        assert abs(clock.offset - offset) <= clock.uncertainty + 1


@given(DELAYS)
def test_processes_of_one_host_have_one_clock(delays: list[tuple[int, int]]) -> None:
    assert measured(0, delays).offset == 0


def test_spans_arrive_in_the_time_of_this_process() -> None:
    clock = measured(50 * SECOND, [(2_000_000, 2_000_000)])
    span = Span("Env[0]", "step", 60 * SECOND, 5, {"batch": 2})
    assert clock.aligned([span]) == [Span("Env[0]", "step", 10 * SECOND, 5, {"batch": 2})]
    assert PeerClock().aligned([span]) == [span]
