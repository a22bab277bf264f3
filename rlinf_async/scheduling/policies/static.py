"""`Static`: nobody's devices change."""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.state import ClusterState


class Static:
    """Everybody keeps the devices that it was launched with."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return that nothing changes."""
        return ScalingDecision(iteration=state.iteration)
