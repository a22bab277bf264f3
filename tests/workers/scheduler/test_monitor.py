"""What the scheduler expects of requests, by what it has seen."""

from __future__ import annotations

from rlinf_async.messages.language import RequestCount
from rlinf_async.workers.scheduler.messages import EndedCount
from rlinf_async.workers.scheduler.monitor import UNKNOWN_TOKENS, Responses

SAMPLES, GROUP = 8, 4


def asked(group: int, made: int = 0, most: int = 1000) -> RequestCount:
    return RequestCount(name=f"{group}", made=made, most=most, group=group)


def ended(iteration: int, group: int, *lengths: int) -> list[EndedCount]:
    return [
        EndedCount(name=f"{group}/{at}", iteration=iteration, group=group, tokens=tokens)
        for at, tokens in enumerate(lengths)
    ]


def test_in_the_first_iteration_the_mean_is_expected_of_its_own_group_where_it_is_known() -> None:
    seen = Responses(SAMPLES, GROUP)
    assert seen.expected(asked(0)) == UNKNOWN_TOKENS
    seen.note(ended(0, 0, 10, 30))
    assert seen.expected(asked(0)) == 20.0
    assert seen.expected(asked(1)) == 20.0
    seen.note(ended(0, 1, 80))
    assert seen.expected(asked(1)) == 80.0
    assert seen.expected(asked(1, made=60)) == 30.0  # half as many again
    assert seen.expected(asked(1, most=50)) == 50.0


def test_later_the_lengths_of_earlier_iterations_are_but_groups_still_differ_while_they_wait() -> (
    None
):
    seen = Responses(SAMPLES, GROUP)
    seen.note(ended(0, 0, 10, 30, 100, 100))
    seen.begin(1)
    assert seen.expected(asked(2)) == 60.0
    assert seen.expected(asked(2, made=30)) == 70.0  # of those above 30, less the 30
    seen.note(ended(1, 2, 10, 12))
    assert seen.expected(asked(2)) == 11.0
    assert seen.expected(asked(3)) == 60.0
    assert seen.expected(asked(2, made=30)) == 70.0
