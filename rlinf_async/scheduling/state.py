"""`ClusterState`: all that a scaling policy sees of a run. Plain data, which can travel.

Devices are numbered over the whole cluster. A rollout *instance* is one engine; it serves on the
devices that it holds, or is stopped and holds none. The ranks of the actor have one device each, in
order: under a strategy of ``n`` ranks the first ``n`` are held. An instance and a rank of the actor
may be launched on the same device; at any time one of them holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.ledger import Holding, Loan

ACTOR = "actor"
"""the actor as a holder of devices"""


def instance_name(number: int) -> str:
    """Return the name of a rollout instance as a holder of devices."""
    return f"rollout[{number}]"


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is not finished."""

    name: str
    made: int = 0
    """tokens of its response so far"""
    expected: float = 0.0
    """expected number of tokens that are still to come"""


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout instance."""

    number: int
    home: tuple[int, ...]
    """devices that it was launched on"""
    devices: tuple[int, ...]
    """devices that it holds now; none while it is stopped"""
    stopping: bool = False
    """it is to release them, and has not said that it has"""
    due: tuple[int, ...] = ()
    """devices on which it serves as soon as nobody else may hold one of them"""
    slots: int = 64
    """requests that it decodes together"""
    sizes: tuple[int, ...] = ()
    """numbers of devices that it can serve on; none named: only as many as at home"""
    running: int = 0
    waiting: int = 0
    """requests that it has taken and does not decode yet"""
    made: int = 0
    """tokens made for the requests that are here"""
    expected: float = 0.0
    """expected number of tokens that are still to come for the requests that are here"""
    requests: tuple[RequestState, ...] = ()
    """the requests that are here; may be left out where only counts are known"""
    answers: bool = True
    """it has reported in time; one that does not cannot be stopped, nor get other devices while it
    serves"""

    @property
    def serves(self) -> bool:
        """Whether it answers requests."""
        return bool(self.devices) and not self.stopping

    @property
    def load(self) -> int:
        """Number of requests that are here."""
        return self.running + self.waiting

    def fits(self, devices: int) -> bool:
        """Whether it can serve on so many devices."""
        return devices == len(self.home) or devices in self.sizes


class ActorState(msgspec.Struct, frozen=True, kw_only=True):
    """The actor."""

    devices: tuple[int, ...]
    """the device of each launched rank; a strategy of ``n`` ranks holds the first ``n``"""
    strategy: Strategy
    """in force, or the one it comes back with while its devices are lent"""
    home: Strategy
    """in force between two iterations"""
    strategies: tuple[Strategy, ...]
    """all that can share a mini-batch and fit the model"""
    holds: bool = True
    """False: it is offloaded, and others may hold its devices"""
    mini_batches: int = 1
    """of an iteration, over all epochs"""
    mini_batches_done: int = 0
    epochs: int = 1
    """passes over the samples of an iteration"""
    arrived: int | None = None
    """samples that it has received and not trained; None: not known"""
    ready: bool = False
    """at a boundary between mini-batches, where its strategy can change now"""

    @property
    def held(self) -> tuple[int, ...]:
        """The devices that it holds now."""
        return self.devices[: self.strategy.world_size] if self.holds else ()

    def needs(self, strategy: Strategy | None) -> tuple[int, ...]:
        """Return the devices that it needs for a strategy (None: as it is). It takes devices that
        it has lent again under the strategy that it had, and changes then."""
        ranks = (strategy or self.strategy).world_size
        return self.devices[: ranks if self.holds else max(ranks, self.strategy.world_size)]

    @property
    def left(self) -> int:
        """Mini-batches of this iteration that are still to be trained."""
        return self.mini_batches - self.mini_batches_done


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that work takes, as measured or calibrated. 0: not known."""

    decode_seconds: float = 0.0
    """of a decoding step of an instance at home, without what each sequence adds"""
    sequence_seconds: float = 0.0
    """that each running sequence adds to a decoding step"""
    wider: float = 0.6
    """an instance on ``n`` times as many devices decodes ``n ** wider`` times as fast"""
    prefill_seconds: float = 0.0
    """of a token that an instance reads before it goes on with a response of another one"""
    train_seconds: float = 0.0
    """of a forward and backward pass of one token on one device"""
    mini_batch_seconds: float = 0.0
    """of an optimizer step"""
    rescale_seconds: float = 0.0
    """of a change of the actor's strategy, or of lending its devices and taking them back"""
    move_seconds: float = 0.0
    """of stopping an instance and continuing its requests elsewhere"""

    def token_seconds(self, running: float, width: float = 1.0) -> float:
        """Return the seconds of a decoding step on ``width`` times the devices of home."""
        step: float = (self.decode_seconds + running * self.sequence_seconds) / width**self.wider
        return step

    @property
    def known(self) -> bool:
        """Whether throughput can be predicted."""
        return self.decode_seconds + self.sequence_seconds > 0.0 and self.train_seconds > 0.0


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy decides by."""

    time: float
    """seconds, by the loop's clock"""
    iteration: int
    phase: Literal["begin", "step", "end"]
    """``begin``: an iteration begins, nothing of it is generated; ``end``: it was trained"""
    samples: int
    """of an iteration"""
    finished: int
    """samples of this iteration that are generated"""
    tokens: float = 0.0
    """mean number of tokens of a finished sample, prompt included; 0: not known"""
    longest: float = 0.0
    """tokens of the longest response that was seen lately; 0: not known"""
    group: int = 1
    """samples of a prompt, which are trained together"""
    queued: int = 0
    """requests that no instance has taken"""
    queued_expected: float = 0.0
    """expected number of tokens that are still to come for those"""
    queued_requests: tuple[RequestState, ...] = ()
    hosts: dict[int, int] = {}
    """host of each device"""
    lost: tuple[int, ...] = ()
    """devices that nobody can hold any more"""
    instances: tuple[InstanceState, ...]
    actor: ActorState
    rates: Rates = Rates()
    holdings: tuple[Holding, ...] = ()
    """the ledger's"""
    loans: tuple[Loan, ...] = ()
    """the ledger's"""

    @property
    def unfinished(self) -> int:
        """Samples of this iteration that are not generated yet."""
        return max(self.samples - self.finished, 0)

    @property
    def serving(self) -> Iterator[InstanceState]:
        """The instances that answer requests."""
        return (one for one in self.instances if one.serves)

    def instance(self, number: int) -> InstanceState | None:
        """Return the instance of this number, if there is one."""
        return next((one for one in self.instances if one.number == number), None)

    def is_guest(self, instance: InstanceState) -> bool:
        """Whether it was launched on devices that are the actor's between iterations."""
        own = set(self.actor.devices[: self.actor.home.world_size])
        return not own.isdisjoint(instance.home)
