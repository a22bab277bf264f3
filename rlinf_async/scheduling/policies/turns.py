"""`Turns`: generation and training take turns on all devices, as where both are collocated.

::

    an iteration begins        rollout borrows the actor's devices
    everything is generated    the actor takes all devices that it can have, and trains
    an iteration ends          everybody goes home

No device waits for the other role, but all of them wait for the longest response: what `Tail` and
the others have to beat.
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.policies.growing import grow, lend, spread, take_most
from rlinf_async.scheduling.policies.home import all_serve, go_home
from rlinf_async.scheduling.state import ClusterState


class Turns:
    """See the module."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        nothing = ScalingDecision(iteration=state.iteration)
        if state.phase == "end":
            return go_home(state)
        if state.phase == "begin":
            return spread(all_serve(lend(state) or nothing, state), state)
        if state.unfinished:
            return nothing
        if not state.actor.holds:
            return take_most(state) or nothing
        if not state.actor.ready or not state.actor.left:
            return nothing
        return grow(state, (), "everything is generated") or nothing
