"""Spans of work that begins and ends in several places."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_async.workers.base import MergedSpan


class Recorded:
    """Opens spans, and keeps what each was open for in steps of a counter."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, int, int]] = []
        self._moments = itertools.count()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        assert args in ({}, {"iteration": 3})
        began = next(self._moments)
        yield
        self.closed.append((name, began, next(self._moments)))


def test_work_and_its_waits_take_turns() -> None:
    seen = Recorded()
    training = MergedSpan(seen.span, "train", iteration=3)
    with training.piece():
        for _ in range(2):
            with training.cut(), seen.span("wait samples"):
                pass
    assert seen.closed == [
        ("train", 0, 1),
        ("wait samples", 2, 3),
        ("train", 4, 5),
        ("wait samples", 6, 7),
        ("train", 8, 9),
    ]


def test_work_that_fails_ends_its_span() -> None:
    seen = Recorded()
    with pytest.raises(ValueError, match="no"), MergedSpan(seen.span, "train").piece():
        raise ValueError("no")
    assert seen.closed == [("train", 0, 1)]


def test_pieces_that_run_beside_each_other_are_one_span() -> None:
    seen = Recorded()
    generating = MergedSpan(seen.span, "generate")
    one, other, third = generating.piece(), generating.piece(), generating.piece()
    with one:
        with other:
            assert seen.closed == []
        assert seen.closed == []
    assert seen.closed == [("generate", 0, 1)]
    with third:
        pass
    assert seen.closed == [("generate", 0, 1), ("generate", 2, 3)]


def test_a_cut_ends_the_span_and_the_work_goes_on_in_another() -> None:
    seen = Recorded()
    generating = MergedSpan(seen.span, "generate")
    with generating.piece(), generating.cut():
        assert seen.closed == [("generate", 0, 1)]
        with generating.piece():  # begun while it is cut
            assert seen.closed == [("generate", 0, 1)]
    assert seen.closed == [("generate", 0, 1), ("generate", 2, 3)]
    with generating.cut():  # nothing goes on
        pass
    assert seen.closed == [("generate", 0, 1), ("generate", 2, 3)]
