"""Numbers over time: rates of counts, and their tracks in the trace."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlinf_async.observe.trace import Counter, CountRates, Span, read_perfetto, write_perfetto
from tests.observe.test_trace import events


def test_a_rate_is_what_was_added_by_the_time_that_passed() -> None:
    rates, second = CountRates(), 1_000_000_000
    assert rates.per_second("a", second, {"items": 10.0}) == {"items": 0.0}
    assert rates.per_second("b", second, {"items": 0.0}) == {"items": 0.0}
    assert rates.per_second("a", 3 * second, {"items": 30.0}) == {"items": 10.0}
    found = rates.per_second("b", 3 * second, {"items": 1.0, "new": 3.0})
    assert found == {"items": 0.5, "new": 1.5}
    assert rates.per_second("b", 3 * second, {"items": 5.0}) == {"items": 0.0}


def test_what_was_not_there_at_the_last_look_began_at_nothing() -> None:
    rates, second = CountRates(), 1_000_000_000
    rates.per_second("a", second, {"items": 10.0})
    rates.per_second("a", 2 * second, {"items": 10.0})
    rates.per_second("a", 4 * second, {"items": 10.0})
    assert rates.per_second("b", 4 * second, {"items": 6.0}) == {"items": 3.0}


def test_counters_are_tracks_of_their_own_and_spans_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [Span("actor 0", "train", 3_000, 500)]
    counters = [
        Counter("samples -> Actor[0]", 5_000, {"items/s": 2.0, "MB/s": 0.5}),
        Counter("samples -> Actor[0]", 2_000, {"items/s": 1.0, "MB/s": 0.0}),
    ]
    write_perfetto(spans, path, counters=counters)
    found = [(e["name"], e["ts"], e["args"]) for e in events(path, "C")]
    assert found == [
        ("samples -> Actor[0] items/s", 0.0, {"items/s": 1.0}),
        ("samples -> Actor[0] MB/s", 0.0, {"MB/s": 0.0}),
        ("samples -> Actor[0] items/s", 3.0, {"items/s": 2.0}),
        ("samples -> Actor[0] MB/s", 3.0, {"MB/s": 0.5}),
    ]
    processes = {e["pid"]: e["args"]["name"] for e in events(path, "M") if "name" in e["args"]}
    assert [processes[e["pid"]] for e in events(path, "C")] == ["channels"] * 4
    [span] = read_perfetto(path)
    assert span == msgspec.structs.replace(spans[0], start=1_000)
