"""Migration of the longest requests from the instance that ends last to the one that ends first.

An instance with requests that have ``r1 <= ... <= rn`` tokens to come ends after::

    r1 x token time(n) + (r2 - r1) x token time(n - 1) + ... + (rn - rn-1) x token time(1)

A request moves where that ends the last of both instances earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlinf_async.scheduling.decision import Migration
from rlinf_async.scheduling.state import ClusterState, InstanceState, Rates, RequestState

MOST = 8
"""requests that move in one decision"""


def end_of(expected: Sequence[float], width: float, rates: Rates) -> float:
    """Return the seconds in which an instance makes so many tokens of each of its requests."""
    ordered = [0.0, *sorted(expected)]
    running = range(len(expected), 0, -1)
    return sum(
        (later - earlier) * rates.token_seconds(count, width)
        for count, (earlier, later) in zip(running, pairwise(ordered), strict=True)
    )


def balanced(state: ClusterState, least_gain: float) -> tuple[Migration, ...]:
    """Return migrations with which the last instance ends earlier, by this share at least; none
    where requests wait for an instance, or are not known one by one."""
    serving = [one for one in state.serving if one.answers]
    if state.queued or len(serving) < 2 or not state.rates.known:
        return ()
    if any(len(one.requests) != one.load for one in serving):
        return ()
    left = {one.number: list(one.requests) for one in serving}
    found: dict[tuple[int, int], list[RequestState]] = {}
    for _ in range(MOST):
        move = _next_move(serving, left, state.rates, least_gain)
        if move is None:
            break
        source, target, request = move
        left[source].remove(request)
        left[target].append(request)
        found.setdefault((source, target), []).append(request)
    return tuple(
        Migration(source=source, target=target, names=tuple(one.name for one in moved))
        for (source, target), moved in found.items()
    )


def _next_move(
    serving: Sequence[InstanceState],
    left: dict[int, list[RequestState]],
    rates: Rates,
    least_gain: float,
) -> tuple[int, int, RequestState] | None:
    widths = {one.number: len(one.devices) / max(len(one.home), 1) for one in serving}
    slots = {one.number: one.slots for one in serving}

    def end(number: int, requests: Sequence[RequestState]) -> float:
        return end_of([one.expected for one in requests], widths[number], rates)

    ends = {number: end(number, requests) for number, requests in left.items()}
    source = max(ends, key=lambda one: (ends[one], -one))
    target = min(ends, key=lambda one: (ends[one], one))
    if len(left[source]) < 2 or len(left[target]) >= slots[target]:
        return None
    moved = max(left[source], key=lambda one: (one.expected, one.name))
    after = max(
        end(source, [one for one in left[source] if one is not moved]),
        end(target, [*left[target], moved]) + rates.move_seconds,
    )
    return (source, target, moved) if after < ends[source] * (1.0 - least_gain) else None
