"""`Greedy`: of the layouts that can be had now, the one with which the iteration ends first.

It predicts with measured `Rates` (see `estimate`), and changes nothing for less than
`LEAST_GAIN`. As in `Tail`, devices go one way within an iteration: rollout borrows at its
beginning, the actor takes back and grows.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_async.scheduling.decision import ScalingDecision, actor_after
from rlinf_async.scheduling.policies.estimate import seconds_left
from rlinf_async.scheduling.policies.growing import grow, keep_order, lend, take_back
from rlinf_async.scheduling.policies.home import go_home
from rlinf_async.scheduling.state import ClusterState

LEAST_GAIN = 0.03
"""share of the time that is left; a smaller gain is not worth a change"""


class Greedy:
    """See the module. Where rates are not known yet, it decides nothing."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        nothing = ScalingDecision(iteration=state.iteration)
        if state.phase == "end":
            return go_home(state)
        if not state.rates.known:
            return nothing
        best, least = nothing, seconds_left(nothing, state) * (1.0 - LEAST_GAIN)
        for one in candidates(state):
            seconds = seconds_left(one, state)
            if seconds < least:
                best, least = one, seconds
        return best


def candidates(state: ClusterState) -> Iterator[ScalingDecision]:
    """Yield the changes that are possible now."""
    if state.phase == "begin":
        found = [lend(state)]
    elif not state.actor.holds:
        found = [take_back(state)]
    elif not state.actor.ready or not state.actor.left:
        found = []
    else:
        found = list(_growths(state))
    for one in found:
        if one is not None:
            yield one


def _growths(state: ClusterState) -> Iterator[ScalingDecision | None]:
    """Yield one for each strategy that the actor can grow to."""
    order = [one.number for one in keep_order(state)]
    seen: set[int] = set()
    for count in range(len(order), 0, -1):
        one = grow(state, order[:count], f"{count} instances are enough")
        if one is None:
            continue
        ranks = actor_after(one, state.actor).strategy.world_size
        if ranks not in seen:
            seen.add(ranks)
            yield one
