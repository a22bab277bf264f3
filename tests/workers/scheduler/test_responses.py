"""By which lengths of finished responses others are expected."""

from __future__ import annotations

import pytest

from rlinf_async.messages.language import RequestCount
from rlinf_async.workers.scheduler import monitor as responses
from rlinf_async.workers.scheduler.messages import (
    EndedCount,
)
from rlinf_async.workers.scheduler.monitor import Responses


def ended(iteration: int, group: int, index: int, tokens: int) -> EndedCount:
    return EndedCount(
        name=f"{group}/{index}", iteration=iteration, group=group, tokens=tokens, made=tokens
    )


def test_the_mean_is_the_same_all_through_an_iteration_however_many_samples_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "KNOWN_LENGTHS", 4)
    seen = Responses(samples=16, group=1, lengths=[100.0, 300.0])
    for iteration in range(3):
        for at in range(16):  # short ones are finished first
            seen.note([ended(iteration, 16 * iteration + at, 0, tokens=25 * at + 13)])
            assert seen.mean == 200.0 if not iteration else seen.mean == pytest.approx(200.5)
        seen.begin(iteration + 1)
    assert seen.expected(RequestCount(name="next", made=0, most=9999, group=99)) == 200.5
    assert seen.expected(RequestCount(name="next", made=380, most=9999, group=99)) == 8.0


def test_iterations_are_remembered_as_long_as_newer_ones_have_too_few_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "KNOWN_LENGTHS", 4)
    seen = Responses(samples=2, group=1)
    means: list[float] = []
    for iteration, tokens in enumerate((10, 20, 60, 100)):
        seen.note([ended(iteration, 2 * iteration + at, 0, tokens) for at in range(2)])
        seen.begin(iteration + 1)
        means.append(seen.mean)
    assert means == [10.0, 15.0, 40.0, 80.0]


def test_every_whole_group_counts_however_many_are_begun() -> None:
    groups = 5000
    seen = Responses(samples=2 * groups, group=2)
    for index in range(2):
        seen.note(ended(0, group, index, tokens=7) for group in range(groups))
        assert seen.in_whole_groups(0) == index * 2 * groups
    assert seen.finished(0) == 2 * groups


def test_an_iteration_of_which_only_the_end_was_seen_tells_nothing_where_lengths_are_known() -> (
    None
):
    seen = Responses(samples=8, group=1, lengths=[100.0])
    seen.note(ended(0, group, 0, tokens=900) for group in range(3))
    seen.begin(1)
    assert seen.mean == 100.0
    unknown = Responses(samples=8, group=1)
    unknown.note(ended(0, group, 0, tokens=900) for group in range(3))
    unknown.begin(1)
    assert unknown.mean == 900.0


def test_evaluations_and_responses_that_are_finished_twice_do_not_count() -> None:
    seen = Responses(samples=4, group=2)
    seen.note([ended(-1, 0, 0, tokens=50), ended(0, 0, 0, tokens=10), ended(0, 0, 0, tokens=30)])
    assert (seen.finished(0), seen.mean, seen.longest) == (1, 10.0, 50.0)
