"""The arrays of which the page draws a timeline hold every span of the trace once."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from rlinf_async.observe.trace import Span, write_perfetto
from rlinf_async.view import spans
from tests.view.kit import write_trace


def starts(digested: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    (length,) = struct.unpack_from("<I", digested, 4)
    count = spans.header_of(digested)["spans"]
    return np.frombuffer(digested, "<f8", count, 8 + length)


def test_every_span_is_in_one_row_and_rows_do_not_overlap(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json.gz")
    digested = spans.digest(tmp_path / "trace.json.gz")
    header = spans.header_of(digested)
    assert header["spans"] == 210 == sum(row["count"] for row in header["rows"])
    assert [(row["worker"], row["depth"]) for row in header["rows"]] == [
        ("Actor[0]", 0), ("Actor[0]", 1), ("Reward[0]", 0), ("Rollout[0]", 0), ("Rollout[1]", 0),
    ]  # fmt: skip
    first = 0
    for row in header["rows"]:
        part = starts(digested)[first : first + row["count"]]
        assert (np.diff(part) > 0).all()
        first += row["count"]
    waits = zip(header["names"], header["waits"], strict=True)
    assert [name for name, waiting in waits if waiting] == ["wait requests"]


def test_the_arguments_of_a_span_are_its_own(tmp_path: Path) -> None:
    made = [
        Span("b", "x", 5_000, 10, {"at": 5}), Span("a", "y", 1_000, 9_000, {"at": 1}),
        Span("a", "z", 2_000, 10), Span("a", "w", 3_000, 10, {"html": "<b>"}),
    ]  # fmt: skip
    write_perfetto(made, tmp_path / "t.json")
    digested = spans.digest(tmp_path / "t.json")
    found = [spans.arguments_of(digested, span) for span in range(4)]
    assert found == [{"at": 1}, {}, {"html": "<b>"}, {"at": 5}]
    with pytest.raises(IndexError, match="none has the number 4"):
        spans.arguments_of(digested, 4)
    assert digested.startswith(spans.drawn_part(digested))
    assert b"<b>" not in spans.drawn_part(digested)


def test_a_trace_of_nothing_is_no_special_case(tmp_path: Path) -> None:
    write_perfetto([], tmp_path / "t.json.gz")
    header = spans.header_of(spans.digest(tmp_path / "t.json.gz"))
    assert (header["spans"], header["rows"], header["end"]) == (0, [], 0)
