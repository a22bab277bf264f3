"""`LongestFirst`: requests by predicted remaining length, and wider instances for the tail.

As `Greedy`, and besides:

- requests that wait are served longest first, so that the long ones do not begin last;
- instances are merged into fewer and wider ones (see `widening`) once a token takes a fifth less
  time there, and that wins more than moving the responses costs;
- devices that nobody needs go to the instances with the most to do for one request;
- of instances that are not merged, the one that ends last hands its longest requests to the one
  that ends first (see `balancing`).

Within an iteration instances only become wider.
"""

from __future__ import annotations

import msgspec

from rlinf_async.scheduling.decision import Resume, ScalingDecision, holdings_after
from rlinf_async.scheduling.policies.balancing import balanced
from rlinf_async.scheduling.policies.forecast import Forecast
from rlinf_async.scheduling.policies.greedy import LEAST_GAIN, Greedy
from rlinf_async.scheduling.policies.growing import keep_order, wanted_by_actor
from rlinf_async.scheduling.policies.widening import widenings
from rlinf_async.scheduling.state import ClusterState, InstanceState, RequestState

THIN = 0.25
"""share of its slots below which an instance's tail is worth more devices"""

FASTER = 0.2
"""share of the time of a token that wider instances have to win now, or it is early to merge: the
fewer responses are left, the less there is to move"""


class LongestFirst:
    """See the module."""

    orders = True
    """it wants to know the requests in the queue one by one"""

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
        more = [] if one.number in taken else _more(one, free, state)
        if more:
            found.append(Resume(instance=one.number, devices=(*one.devices, *more)))
            free = [device for device in free if device not in more]
    return found


def _more(one: InstanceState, free: list[int], state: ClusterState) -> list[int]:
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
