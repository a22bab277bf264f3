"""`Static`: nobody's devices change."""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.policies.home import all_serve, go_home
from rlinf_async.scheduling.state import ClusterState


class Static:
    """Everybody keeps the devices that it was launched with. Where another policy, which failed,
    has given them to others, all go home, once the actor is at a boundary."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return that nothing changes, or who goes home."""
        if not state.actor.ready:
            return ScalingDecision(iteration=state.iteration)
        decision = go_home(state)
        return all_serve(decision, state) if state.phase == "begin" else decision
