"""The configuration of the scheduler, and what it has to know of the run."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import ACTOR, Rates, instance_name


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which devices move between rollout workers and actors while the run goes on."""

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
    """for which the scheduler waits for reports; who does not answer is left as it is"""
    stop_seconds: float = 30.0
    """for which it waits until a rollout worker has stopped or come back"""
    change_seconds: float = 120.0
    """that a change of the actors' strategy may take"""
    every: float = 0.05
    """share of an iteration's samples after which the policy is asked again"""
    rates: Rates = Rates()
    """seconds that work takes, where they are known before the run measures them: from
    ``rlinf-async calibrate``"""
    lengths: tuple[float, ...] = ()
    """of responses of an earlier run, in tokens"""

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError("policy is empty; set it to 'static' or 'tail', or leave it out")
        for name in ("answer_seconds", "stop_seconds", "change_seconds"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.guests < 0:
            raise ValueError(f"guests is {self.guests}; it must be at least 0")
        if not 0.0 < self.every <= 1.0:
            raise ValueError(f"every is {self.every}; it must lie above 0 and be at most 1")

    @property
    def patience(self) -> float:
        """Seconds that an actor waits for the scheduler at a boundary before it goes on."""
        return self.answer_seconds + self.stop_seconds + 1.0


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Who was launched on which devices; devices are numbered over the whole cluster."""

    instances: tuple[tuple[int, ...], ...]
    """devices of each rollout worker"""
    actor: tuple[int, ...]
    """the device of each launched rank of the actor"""
    home: Strategy
    """of the actor between two iterations"""
    strategies: tuple[Strategy, ...]
    """all that fit the model and the mini-batch"""
    samples: int
    """of an iteration"""
    group: int = 1
    """samples of a prompt, which are trained together"""
    hosts: dict[int, int] = {}
    """host of each device; one for all where left out"""
    sizes: tuple[int, ...] = ()
    """numbers of devices that an instance can serve on, beside that at home"""
    workers: int = 0
    """workers of the actor that report; 0: one for each rank"""

    @property
    def owners(self) -> dict[int, str]:
        """Of each device, who has it between two iterations."""
        found = {
            device: instance_name(number)
            for number, home in enumerate(self.instances)
            for device in home
        }
        return found | dict.fromkeys(self.actor[: self.home.world_size], ACTOR)

    def ranks_of(self, worker: int) -> range:
        """Return the ranks that a worker of the actor stands for."""
        each = self.home.world_size // self.home.dp if self.workers else 1
        return range(worker * each, (worker + 1) * each)

    @property
    def guests(self) -> tuple[int, ...]:
        """Instances on the actor's own devices, which serve while it lends them."""
        own = set(self.actor[: self.home.world_size])
        return tuple(n for n, home in enumerate(self.instances) if not own.isdisjoint(home))
