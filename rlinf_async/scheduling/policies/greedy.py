"""`Greedy`: of the layouts that can be had now, the one with which the iteration ends first.

It predicts with measured `Rates` (see `estimate`), and changes nothing for less than
`LEAST_GAIN`. As in `Tail`, devices go one way within an iteration: rollout borrows at its
beginning, the actor takes back and grows.
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.policies.estimate import seconds_left
from rlinf_async.scheduling.policies.growing import (
    grow_to,
    has_work,
    larger_strategies,
    lend,
    take_back,
)
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
        if not state.unfinished and not state.actor.holds:
            least = float("inf")  # nobody needs them any more
        for one in candidates(state):
            seconds = seconds_left(one, state)
            if seconds < least:
                best, least = one, seconds
        return best


def candidates(state: ClusterState) -> list[ScalingDecision]:
    """Return the changes that are possible now."""
    if state.phase == "begin":
        found = [lend(state)]
    elif not state.actor.holds:
        sizes = [
            one for one in state.actor.strategies if one.world_size >= state.actor.home.world_size
        ]
        due = has_work(state) or not state.unfinished
        found = [take_back(state, one) for one in sizes] if due else []
    elif not state.actor.ready or not has_work(state):
        found = []
    else:
        found = [
            grow_to(state, one, f"{state.unfinished} samples are left to generate")
            for one in larger_strategies(state)
        ]
    return [one for one in found if one is not None]
