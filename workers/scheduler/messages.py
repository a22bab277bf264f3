"""Messages between the scheduler, the rollout workers, the actors and the job.

::

    Orders          scheduler    -> rollout, actor   who serves, and what the actor changes to
                                                     (`Latest`: it holds for all later ones, too)
    InstanceReport  rollout      -> scheduler        orders are carried out; how far requests are
    InstanceNews    rollout      -> scheduler        responses are finished, requests have begun
    SamplesTold   the job      -> scheduler        episodes are finished, groups replaced
    DevicesReport   whoever      -> scheduler        devices are lost, or there again
                    watches hosts
    ActorReady      actor rank 0 -> scheduler        at a boundary between two mini-batches
    ActorChanged    actor        -> scheduler        of each rank: what is in force now
    Verdict         actor rank 0 -> other ranks      what each rank does at a boundary, by rank
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
    """scheduler -> rollout, actor: what holds from now on."""

    sequence: int = 0
    """number of these orders, which counts up; every instance reports once for each"""
    scheduler: int = 0
    """incarnation of the scheduler; a new one has not heard who is ready"""
    devices: tuple[tuple[int, ...], ...] = ()
    """by instance: the devices that it serves on; none: it is stopped. Devices that it did not have
    before are free: whoever held them has released them"""
    due: tuple[Resume, ...] = ()
    """instances that get devices once nobody else holds these any more"""
    held: tuple[Holding, ...] = ()
    """who may hold which devices, for a scheduler that is started again"""
    lost: tuple[int, ...] = ()
    """devices that nobody can hold, for a scheduler that is started again"""
    migrate: bool = True
    """whether an instance that stops hands its requests back; else it finishes them"""
    takers: tuple[int, ...] | None = None
    """instances that take requests; None: all that serve. Fewer while requests move from one
    instance to another, so that nobody else takes them"""
    hand_back: tuple[HandBack, ...] = ()
    boundary: Boundary | None = None
    """boundary of the actor for which ``strategy``, ``holds`` and ``goes_on`` hold"""
    strategy: Strategy | None = None
    """strategy of the actor from the boundary on; None: the present one"""
    holds: bool = True
    """whether the actor holds its devices; else it offloads, and others have them until later
    orders"""
    goes_on: bool = True
    """whether the actor leaves the boundary; else it stays there until later orders"""
    ranks_report: bool = False
    """whether every rank of the actor says what it holds there, even if nothing changes"""
    reason: str = ""
    """reason of the decision, for logs and traces"""

    def devices_of(self, instance: int) -> tuple[int, ...]:
        """Return the devices that an instance serves on; none: it is stopped."""
        return self.devices[instance] if instance < len(self.devices) else ()


class EndedCount(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is finished."""

    group: int
    tokens: int
    name: str = ""
    """name of the request: where a worker dies it may be finished twice"""
    iteration: int = -1
    """iteration of the request; -1: of an evaluation"""
    turn: int = 0
    """number of the turn of an episode, from 1 on; 0: it is a whole sample"""
    made: int = 0
    """tokens that this engine made in one piece; a moved request brought the others along"""
    seconds: float = 0.0
    """seconds for which this engine made them"""
    running: float = 0.0
    """mean number of requests that were decoded together meanwhile"""


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True, tag="instance"):
    """rollout -> scheduler: the orders of this sequence are carried out."""

    instance: int
    sequence: int
    devices: tuple[int, ...]
    """devices that the instance holds now; none: it is stopped"""
    slots: int
    """requests that the engine decodes together"""
    samples: int
    """samples sent on since the instance was started"""
    tokens: int
    """tokens of the samples sent on"""
    queued: int
    """requests that no instance has taken"""
    taken: int = 0
    """requests that are with any instance, as their channel knows; those of a dead instance count
    until they are queued again"""
    requests: tuple[RequestCount, ...] = ()
    handed_back: int = 0
    """requests that the instance handed back to carry out these orders"""
    ended: tuple[EndedCount, ...] = ()
    """responses that were finished since the instance's last report"""


class InstanceNews(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """rollout -> scheduler: what has happened since the instance's last message, unasked."""

    instance: int
    ended: tuple[EndedCount, ...] = ()
    began: tuple[str, ...] = ()
    """names of requests that the instance has taken, while only some instances take any"""


class SamplesTold(msgspec.Struct, frozen=True, kw_only=True, tag="samples"):
    """the job -> scheduler: what rollout workers do not know. A scheduler that was started again is
    told of all that is not trained."""

    ended: tuple[EndedCount, ...] = ()
    """episodes that are finished"""
    replaced: tuple[EndedCount, ...] = ()
    """samples whose group was replaced by another prompt: the iteration does not have them"""


class DevicesReport(msgspec.Struct, frozen=True, kw_only=True, tag="devices"):
    """watcher of hosts -> scheduler: devices that nobody can use, or that are there again.

    It is sent again from time to time: a scheduler that dies may have read it without acting on it.
    """

    lost: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


class ActorReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """actor rank 0 -> scheduler: the actor's strategy can change now."""

    boundary: Boundary
    mini_batches: int
    """mini-batches of an iteration, over all epochs"""
    strategy: Strategy
    """strategy in force"""
    epochs: int = 1
    """passes over the samples of an iteration"""
    tokens: int = 0
    """tokens that this data rank trained since the last boundary"""
    seconds: float = 0.0
    """seconds for which this data rank trained since the last boundary, without waits for samples
    """
    holds: bool = True
    """whether the actor holds its devices; else it has offloaded, and waits to get them back"""
    collects: bool = False
    """whether a mini-batch is trained only once all of its samples are there: until then the actor
    may stay at the boundary, and change"""


class ActorChanged(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """actor -> scheduler: what one rank has done about orders. The rank has released what it does
    not hold any more."""

    rank: int
    boundary: Boundary
    sequence: int
    """sequence of the orders"""
    strategy: Strategy
    """strategy in force now"""
    holds: bool = True
    """whether the rank has its devices; else it has offloaded"""
    error: str = ""
    """why the strategy is not the one that was ordered"""


SchedulerReport = (
    InstanceReport | InstanceNews | SamplesTold | ActorReady | ActorChanged | DevicesReport
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """actor rank 0 -> each other rank: what all ranks do at a boundary. Each follows every one, in
    order."""

    boundary: Boundary
    sequence: int = 0
    """sequence of the orders that the verdict follows"""
    strategy: Strategy | None = None
    """strategy of all ranks from the boundary on; None: each keeps the one it has"""
    holds: bool = True
    goes_on: bool = True
    changes: bool = False
    """whether every rank reports what came of the orders"""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Devices on which everyone was launched; devices are numbered over the whole cluster."""

    instances: tuple[tuple[int, ...], ...]
    """devices of each rollout worker"""
    actor: tuple[int, ...]
    """device of each launched rank of the actor"""
    home: Strategy
    """strategy of the actor between two iterations"""
    strategies: tuple[Strategy, ...]
    """all strategies that fit the model and the mini-batch"""
    samples: int
    """samples of an iteration"""
    group: int = 1
    """samples of a prompt, which are trained together"""
    hosts: dict[int, int] = {}
    """host of each device; one host for all where left out"""
    sizes: tuple[int, ...] = ()
    """numbers of devices that an instance can serve on, besides that at home"""
    workers: int = 0
    """workers of the actor that report; 0: one for each rank"""

    @property
    def owners(self) -> dict[int, str]:
        """Owner of each device between two iterations."""
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
