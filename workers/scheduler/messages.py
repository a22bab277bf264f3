"""Messages between the scheduler, the rollout workers, the actors and the job.

::

    Orders          scheduler    -> rollout, actor   who serves, and what the actor changes to
                                                     (`Latest`: it holds for all later ones, too)
    InstanceReport  rollout      -> scheduler        orders are carried out; how far requests are
    InstanceNews    rollout      -> scheduler        responses are finished, requests have begun
    DevicesReport   whoever      -> scheduler        devices are lost, or there again
                    watches hosts
    ActorReady      actor rank 0 -> scheduler        at a boundary between two mini-batches
    ActorChanged    actor        -> scheduler        of each rank: what is in force now
    Verdict         actor rank 0 -> other ranks      what all ranks do at a boundary (`Latest`)
    DataShare       actor rank 0 -> collector        who trains the next global batch

Orders say how things are to be, not what to do: who missed some, or was restarted, reads the newest
and is right again.

`Topology` is what the scheduler has to know of a run before it begins.
"""

from __future__ import annotations

import msgspec

from rlinf_async.messages.language import Boundary, RequestCount
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import ACTOR, Holding, Resume, instance_name


class HandBack(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that an instance hands back, with their tokens, and goes on serving others."""

    instance: int
    names: tuple[str, ...]


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """scheduler -> rollout, actor: how things are to be from now on."""

    sequence: int = 0
    """counts up; every instance reports once for each"""
    scheduler: int = 0
    """incarnation of the scheduler; another one has not heard who is ready"""
    devices: tuple[tuple[int, ...], ...] = ()
    """of each instance, those that it serves on; none: it is stopped. It may take those that it did
    not have: whoever held them has released them"""
    due: tuple[Resume, ...] = ()
    """instances that get devices once nobody else holds these any more"""
    held: tuple[Holding, ...] = ()
    """who may hold which devices, for a scheduler that is started again"""
    lost: tuple[int, ...] = ()
    """devices that nobody can hold, for the same"""
    migrate: bool = True
    """an instance that stops hands its requests back, else it finishes them"""
    takers: tuple[int, ...] | None = None
    """instances that take requests, of those that serve; None: all. While requests move from one to
    another, so that nobody else takes them"""
    hand_back: tuple[HandBack, ...] = ()
    boundary: Boundary | None = None
    """the place of the actor for which the next three hold"""
    strategy: Strategy | None = None
    """of the actor from there on; None: as it is"""
    holds: bool = True
    """False: the actor offloads, and its devices are others' until later orders"""
    goes_on: bool = True
    """False: the actor stays there, until later orders"""
    ranks_report: bool = False
    """every rank of the actor says what it holds there, though nothing changes"""
    reason: str = ""
    """for logs and traces"""

    def devices_of(self, instance: int) -> tuple[int, ...]:
        """Return the devices that an instance serves on; none: it is stopped."""
        return self.devices[instance] if instance < len(self.devices) else ()


class EndedCount(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is finished."""

    group: int
    tokens: int
    name: str = ""
    """of its request: where a worker dies it may be finished twice"""
    iteration: int = -1
    """-1: of none, of an evaluation"""
    made: int = 0
    """of these tokens, those that were made here, in one piece"""
    seconds: float = 0.0
    """for which its engine made them"""
    running: float = 0.0
    """requests that were decoded together meanwhile"""


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True, tag="instance"):
    """rollout -> scheduler: the orders of this sequence are carried out."""

    instance: int
    sequence: int
    devices: tuple[int, ...]
    """that it holds now; none: it is stopped"""
    slots: int
    """requests that it decodes together"""
    samples: int
    """that it has sent on since it was started"""
    tokens: int
    """of these"""
    queued: int
    """requests that no instance has taken"""
    taken: int = 0
    """requests that are with any instance, as their channel knows it: those of one that died are,
    until they are queued again"""
    requests: tuple[RequestCount, ...] = ()
    handed_back: int = 0
    """requests that it handed back to carry out these orders"""
    ended: tuple[EndedCount, ...] = ()
    """responses that were finished since its last report"""


class InstanceNews(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """rollout -> scheduler: what has happened since its last message, without being asked."""

    instance: int
    ended: tuple[EndedCount, ...] = ()
    began: tuple[str, ...] = ()
    """names of requests that it has taken, while some instances alone take any"""


class DevicesReport(msgspec.Struct, frozen=True, kw_only=True, tag="devices"):
    """whoever watches hosts -> scheduler: nobody can use these devices, or can again.

    Who sends it says it again from time to time: a scheduler that dies may have read it, and not
    carried it out.
    """

    lost: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


class ActorReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """actor rank 0 -> scheduler: its strategy can change now."""

    boundary: Boundary
    mini_batches: int
    """of an iteration, over all epochs"""
    strategy: Strategy
    """in force"""
    epochs: int = 1
    """passes over the samples of an iteration"""
    tokens: int = 0
    """that this data rank trained since the last boundary"""
    seconds: float = 0.0
    """for which it trained them, without waits for samples"""
    holds: bool = True
    """it holds its devices; else it has offloaded, and waits to get them back"""
    collects: bool = False
    """it trains a mini-batch only once all of its samples are there: until then it may stay at the
    boundary, and change"""


class ActorChanged(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """actor -> scheduler: what came of orders on one rank, which has released what it does not hold
    any more."""

    rank: int
    boundary: Boundary
    sequence: int
    """of the orders"""
    strategy: Strategy
    """in force now"""
    holds: bool = True
    """it has its devices; else it has offloaded"""
    error: str = ""
    """why the strategy is not the one that was ordered"""


SchedulerReport = InstanceReport | InstanceNews | ActorReady | ActorChanged | DevicesReport


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """actor rank 0 -> other ranks: what all of them do at a boundary. It says how things are to be:
    a rank that missed one goes on from the next."""

    boundary: Boundary
    number: int = 0
    """counts up"""
    sequence: int = 0
    """of the orders that it follows"""
    strategy: Strategy | None = None
    """of all ranks from there on; None: each goes on with what it has"""
    holds: bool = True
    goes_on: bool = True
    changes: bool = False
    """every rank says what came of it"""


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
