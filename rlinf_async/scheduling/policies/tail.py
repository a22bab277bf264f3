"""`Tail`: the built-in policy of an on-policy step whose lengths have a long tail.

::

    an iteration begins          rollout borrows the actor's devices
    half of its samples done     the actor takes them again, and trains what is there
    after each mini-batch        instances that are not needed for what is unfinished stop; their
                                 requests go to the others; the actor grows into their devices
    an iteration ends            everybody goes home
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.policies.growing import (
    grow,
    has_work,
    instances_needed,
    keep_order,
    lend,
    spread,
    take_back,
)
from rlinf_async.scheduling.policies.home import all_serve, go_home
from rlinf_async.scheduling.state import ClusterState

LENT_UNTIL = 0.5
"""share of an iteration's samples that is generated on the actor's devices, too"""


class Tail:
    """See the module."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        nothing = ScalingDecision(iteration=state.iteration)
        if state.phase == "end":
            return go_home(state)
        if state.phase == "begin":
            return spread(all_serve(lend(state) or nothing, state), state)
        if not state.actor.holds:
            due = state.finished >= LENT_UNTIL * state.samples or not state.unfinished
            return (take_back(state) if due else None) or nothing
        if not state.actor.ready or not has_work(state):
            return nothing
        kept = [one.number for one in keep_order(state)[: instances_needed(state)]]
        return grow(state, kept, f"{state.unfinished} samples are left to generate") or nothing
