"""`LongestFirst`: requests by predicted remaining length, and wider instances for the tail.

As `Greedy`, and besides:

- requests that wait are served longest first, so that the long ones do not begin last;
- instances are merged into fewer and wider ones (see `merged`) once a token takes a fifth less
  time there, and that wins more than moving the responses costs;
- devices that nobody needs go to the instances with the most to do for one request;
- of instances that are not merged, the one that ends last hands its longest requests to the one
  that ends first (see `balanced`).

Within an iteration instances only become wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from rlinf_async.scheduling.policies.greedy import LEAST_GAIN, Forecast, Greedy
from rlinf_async.scheduling.policies.simple import keep_order, migrations, wanted_by_actor
from rlinf_async.scheduling.state import (
    ClusterState,
    InstanceState,
    Migration,
    Rates,
    RequestState,
    Resume,
    ScalingDecision,
    holdings_after,
    instance_name,
)

MOST = 8
"""requests that move in one decision"""


def end_of(expected: Sequence[float], width: float, rates: Rates) -> float:
    """Return the seconds in which an instance finishes requests of the ``expected`` tokens."""
    ordered = [0.0, *sorted(expected)]
    running = range(len(expected), 0, -1)
    return sum(
        (later - earlier) * rates.token_seconds(count, width)
        for count, (earlier, later) in zip(running, pairwise(ordered), strict=True)
    )


def balanced(state: ClusterState, least_gain: float) -> tuple[Migration, ...]:
    """Return migrations with which the last instance ends earlier, by this share at least; none
    where requests wait for an instance, or are not known one by one.

    An instance with requests that have ``r1 <= ... <= rn`` tokens to come ends after::

        r1 x token time(n) + (r2 - r1) x token time(n - 1) + ... + (rn - rn-1) x token time(1)

    A request moves where that ends the last of both instances earlier.
    """
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


def widenings(decision: ScalingDecision, state: ClusterState) -> list[ScalingDecision]:
    """Return the decision with instances merged to each larger width that they can have."""
    widths = {size for one in state.instances for size in (*one.sizes, len(one.home))}
    widest = max((len(one.devices) for one in state.serving), default=0)
    found = [merged(decision, state, size) for size in sorted(widths) if size > widest]
    return [one for one in found if one is not None]


def merged(decision: ScalingDecision, state: ClusterState, size: int) -> ScalingDecision | None:
    """Return the decision with one instance for each block of ``size`` devices of a host; None
    where there is no such block.

    With few requests for each instance a step is bound by reading the weights, and takes nearly as
    long for one request as for ten: so the tail is faster on fewer instances that are wider.
    """
    holdings = holdings_after(decision, state)
    changing = {*decision.stop, *(one.instance for one in decision.resume)}
    here = [
        one
        for one in state.instances
        if one.answers and one.number not in changing and holdings[instance_name(one.number)]
    ]
    blocks: dict[tuple[int, int], list[InstanceState]] = {}
    first: dict[int, int] = {}
    for device in sorted(state.hosts):
        first.setdefault(state.hosts[device], device)
    for one in here:
        host = state.hosts[one.devices[0]]
        blocks.setdefault((host, (one.devices[0] - first[host]) // size), []).append(one)
    stop: list[InstanceState] = []
    resume: list[Resume] = []
    for _, members in sorted(blocks.items()):
        devices = sorted({device for one in members for device in one.devices})
        fitting = [one for one in members if one.fits(size)]
        if len(devices) != size or len(members) < 2 or not fitting:
            continue
        stays = max(fitting, key=lambda one: (one.load, -one.number))
        resume.append(Resume(instance=stays.number, devices=tuple(devices)))
        stop += [one for one in members if one is not stays]
    if not resume:
        return None
    return msgspec.structs.replace(
        decision,
        stop=(*decision.stop, *(one.number for one in stop)),
        resume=(*decision.resume, *resume),
        migrations=(*decision.migrations, *migrations(stop)),
        reason=f"{state.unfinished} samples on instances of {size} devices",
    )


THIN = 0.25
"""share of its slots below which an instance's tail is worth more devices"""

FASTER = 0.2
"""share of the time of a token that wider instances have to win now, or it is early to merge: the
fewer responses are left, the less there is to move"""


class LongestFirst:
    """Requests by predicted remaining length, and wider instances for the tail: see the module."""

    orders = True
    """whether the policy wants to know the requests in the queue one by one"""

    def __init__(self) -> None:
        self._layout = Greedy()

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        decision = self._layout.decide(state)
        if state.phase == "end":
            return decision
        if state.phase == "step":
            more = [] if decision.stop else widened(decision, state)
            decision = msgspec.structs.replace(decision, resume=(*decision.resume, *more))
            if state.rates.known and not decision.changes_devices:
                decision = _wider(decision, state)
        migrations = decision.migrations
        if state.phase == "step" and not decision.changes_devices:
            migrations = balanced(state, LEAST_GAIN)
        order = longest_first(state.queued_requests)
        return msgspec.structs.replace(decision, order=order, migrations=migrations)


def _wider(decision: ScalingDecision, state: ClusterState) -> ScalingDecision:
    """Return the decision, or one with instances merged where that pays (see `FASTER`)."""
    forecast = Forecast(state)
    units, width = forecast.units(), forecast.width
    as_it_is = forecast.decode_seconds(units, width, 0.0, forecast.end)
    best, most = decision, 0.0
    for one in widenings(decision, state):
        wide = max(len(each.devices) for each in one.resume) / len(state.instances[0].home)
        moved = forecast.requests / units * (wide - width)
        cost = forecast.move_seconds(moved, wide)
        now, then = (forecast.token_seconds(units, each) for each in (width, wide))
        gain = as_it_is - forecast.decode_seconds(units, wide, 0.0, forecast.end) - cost
        if gain > most and then <= (1.0 - FASTER) * now:
            best, most = one, gain
    return best


def longest_first(requests: tuple[RequestState, ...]) -> tuple[str, ...]:
    """Return the names of the requests, those with the most tokens to come first; none where they
    all are expected to be equally long."""
    if len({one.expected for one in requests}) < 2:
        return ()
    return tuple(one.name for one in sorted(requests, key=lambda one: (-one.expected, one.name)))


def widened(decision: ScalingDecision, state: ClusterState) -> list[Resume]:
    """Return instances that take free devices beside their own, once nothing waits to be served."""
    if state.queued or not state.actor.holds:
        return []
    held = {one for devices in holdings_after(decision, state).values() for one in devices}
    known = {device for one in state.instances for device in one.home}
    free = sorted(known - held - set(state.lost) - wanted_by_actor(state))
    found = []
    taken = {one.instance for one in decision.resume}
    for one in sorted(keep_order(state), key=lambda one: -_longest(one)):
        more = [] if one.number in taken else _free_of_host(one, free, state)
        if more:
            found.append(Resume(instance=one.number, devices=(*one.devices, *more)))
            free = [device for device in free if device not in more]
    return found


def _free_of_host(one: InstanceState, free: list[int], state: ClusterState) -> list[int]:
    """Return the free devices of its host that it would take: as many as it can serve on."""
    if not one.answers or not one.load or one.load > THIN * one.slots:
        return []
    host = state.hosts.get(one.devices[0])
    near = [device for device in free if state.hosts.get(device) == host]
    sizes = [size for size in one.sizes if len(one.devices) < size <= len(one.devices) + len(near)]
    return near[: max(sizes) - len(one.devices)] if sizes else []


def _longest(one: InstanceState) -> float:
    if one.requests:
        return max(request.expected for request in one.requests)
    return one.expected / max(one.load, 1)
