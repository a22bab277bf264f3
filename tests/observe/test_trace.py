"""A span is taken once or counted as left out; the trace file is what Perfetto reads."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.trace import (
    Span,
    SpanRecorder,
    by_worker,
    is_waiting,
    read_perfetto,
    write_perfetto,
)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    trace: dict[str, list[dict[str, Any]]] = msgspec.json.decode(path.read_bytes())
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_block_is_recorded_as_a_span_with_its_arguments() -> None:
    recorder = SpanRecorder("rollout 0")
    before = time.monotonic_ns()
    with recorder.span("forward", batch=64):
        inside = time.monotonic_ns()
    (span,) = recorder.take()
    assert (span.worker, span.name, span.args) == ("rollout 0", "forward", {"batch": 64})
    assert before <= span.start <= inside <= span.end <= time.monotonic_ns()
    assert recorder.take() == []


def test_a_block_that_raises_is_recorded_too() -> None:
    recorder = SpanRecorder("env 0")
    with pytest.raises(KeyError), recorder.span("step"):
        raise KeyError("broken")
    assert [span.name for span in recorder.take()] == ["step"]


def test_a_full_recorder_keeps_the_newest_and_counts_the_others() -> None:
    recorder = SpanRecorder("env 0", capacity=3)
    for start in range(5):
        recorder.record("step", start, 1)
    assert [span.start for span in recorder.take()] == [2, 3, 4]
    assert recorder.left_out == 2
    recorder.record("step", 9, 1)
    assert [span.start for span in recorder.take()] == [9]
    assert recorder.left_out == 2


def test_spans_of_several_threads_are_all_taken_or_counted() -> None:
    recorder = SpanRecorder("actor 0", capacity=1000)

    def record() -> None:
        for start in range(2000):
            recorder.record("train", start, 1)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += len(recorder.take())
    taken += len(recorder.take())
    assert taken + recorder.left_out == 6000


def test_a_recorder_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        SpanRecorder("env 0", capacity=0)


def test_spans_travel_as_messages() -> None:
    spans = [Span("env 0", "step", 1, 2, {"stage": 1}), Span("env 0", "reset", 3, 4)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spans), type=list[Span]) == spans


def test_waits_are_recognised_by_their_name() -> None:
    assert is_waiting("wait")
    assert is_waiting("wait actions")
    assert not is_waiting("waiter")
    assert not is_waiting("step")


def test_the_trace_names_workers_and_gives_microseconds_from_the_first_span(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    spans = [
        Span("env 10", "step", 7_000_500, 2_000, {"stage": 1}),
        Span("env 9", "wait actions", 7_000_000, 1_000),
    ]
    write_perfetto(spans, path, left_out={"env 9": 3, "env 10": 0})
    names = {e["pid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "process_name"}
    assert names == {1: "env 9", 2: "env 10"}
    wait, step = events(path, "X")
    assert (wait["name"], wait["cat"], wait["ts"], wait["dur"]) == ("wait actions", "wait", 0, 1)
    assert (step["name"], step["cat"], step["ts"], step["dur"]) == ("step", "work", 0.5, 2)
    assert step["args"] == {"stage": 1}
    notes = msgspec.json.decode(path.read_bytes())["otherData"]
    assert notes == {"monotonic_ns_at_0": 7_000_000, "spans left out of env 9": 3}


spans_of_two_workers = st.lists(
    st.builds(
        Span,
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y", "wait z"]),
        st.integers(0, 50),
        st.integers(0, 20),
    ),
    max_size=30,
)


@given(spans_of_two_workers)
def test_spans_that_share_a_row_of_the_trace_nest(
    tmp_path_factory: pytest.TempPathFactory, spans: list[Span]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_perfetto(spans, path)
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events(path, "X"):
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for place, (start, end) in enumerate(row):
            for other_start, other_end in row[place + 1 :]:
                # A microsecond of a float: nanoseconds are exact to far below a half of one.
                apart = other_start >= end - 1e-6 or other_end <= start + 1e-6
                inside = start <= other_start and other_end <= end + 1e-6
                assert apart or inside


@given(spans_of_two_workers)
def test_a_trace_reads_back_as_the_spans_it_was_written_from(
    tmp_path_factory: pytest.TempPathFactory, spans: list[Span]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_perfetto(spans, path)
    origin = min((span.start for span in spans), default=0)
    expected = [
        Span(span.worker, span.name, span.start - origin, span.duration)
        for row in by_worker(spans).values()
        for span in row
    ]
    assert read_perfetto(path) == expected


def test_spans_of_two_processes_are_merged_by_the_clock_they_share(tmp_path: Path) -> None:
    """The other process records between two spans of this one, and stands between them."""
    program = (
        "import sys, msgspec; from rlinf_async.observe.trace import SpanRecorder\n"
        "recorder = SpanRecorder('other')\n"
        "with recorder.span('step'): pass\n"
        "sys.stdout.buffer.write(msgspec.json.encode(recorder.take()))\n"
    )
    recorder = SpanRecorder("this")
    with recorder.span("before"):
        pass
    answer = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    with recorder.span("after"):
        pass
    spans = recorder.take() + msgspec.json.decode(answer.stdout, type=list[Span])
    write_perfetto(spans, tmp_path / "trace.json")
    ordered = sorted(read_perfetto(tmp_path / "trace.json"), key=lambda span: span.start)
    assert [span.name for span in ordered] == ["before", "step", "after"]


def test_a_compressed_trace_is_smaller_and_reads_back_the_same(tmp_path: Path) -> None:
    spans = [Span("env", "step", at * 1_000, 500, {"stage": at % 2}) for at in range(1_000)]
    for name in ("trace.json", "trace.json.gz"):
        write_perfetto(spans, tmp_path / name)
        assert read_perfetto(tmp_path / name) == spans
    plain, compressed = (tmp_path / name for name in ("trace.json", "trace.json.gz"))
    assert gzip.decompress(compressed.read_bytes()) == plain.read_bytes()
    assert compressed.stat().st_size < plain.stat().st_size / 5


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b"\x1f\x8b", gzip.compress(b"{}", mtime=0)[:-1]],
    ids=["other JSON", "the beginning of gzip", "cut off"],
)
def test_something_else_is_not_read_as_a_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="is not a trace of a run"):
        read_perfetto(path)
