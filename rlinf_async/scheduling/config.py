"""The configuration of the scheduler."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.config.counts import check_bounds
from rlinf_async.scheduling.state import Rates


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that move between rollout workers and actors while the run goes on."""

    policy: str = "static"
    """``static``: none, and there is no scheduler; ``tail``: the actors grow into the devices of
    rollout workers that are not needed any more; ``greedy``, ``longest_first``: where that ends
    the iteration earlier, by measured rates; or a policy of your own: ``module:Class``, or a name
    of the entry point group ``rlinf_async.scaling_policies``"""
    guests: int = 0
    """rollout workers beside ``cluster.rollout_workers``, on the devices of the first actors: they
    serve while the actors lend them, and are stopped else"""
    on_stop: Literal["migrate", "wait"] = "migrate"
    """what a rollout worker that has to stop does with its requests: others go on with them, or it
    finishes them"""
    answer_seconds: float = 5.0
    """seconds for which the scheduler waits for reports; who does not answer is left as it is"""
    stop_seconds: float = 30.0
    """seconds for which the scheduler waits until a rollout worker has stopped or come back"""
    change_seconds: float = 120.0
    """seconds that a change of the actors' strategy may take"""
    every: float = 0.05
    """share of an iteration's samples after which the policy is asked again"""
    rates: Rates = Rates()
    """seconds that work takes, where they are known before the run measures them: from
    ``rlinf-async calibrate``"""
    lengths: tuple[float, ...] = ()
    """lengths of responses of an earlier run, in tokens"""

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError("policy is empty; set it to 'static' or 'tail', or leave it out")
        check_bounds(self, "answer_seconds", "stop_seconds", "change_seconds", above=0)
        check_bounds(self, "guests", least=0)
        check_bounds(self, "every", above=0, most=1)

    @property
    def patience(self) -> float:
        """Seconds that an actor waits for the scheduler at a boundary before it goes on."""
        return self.answer_seconds + self.stop_seconds + 1.0
