"""`Holdings`: who may hold which device, by what everyone was told and has said since.

::

    orders give devices    -> may hold them from then on, whether it answers or not
    orders take them away  -> may hold them until its report says that it has released them
    a report               -> counts where it is not older than the orders that gave devices last

Invariant, **one holder**: nobody is told to take a device that somebody else may hold. The orders
carry the holdings, so that a scheduler that is started again knows no less than its predecessor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlinf_async.scheduling import ACTOR, DeviceLedger, Holding, instance_name
from rlinf_async.workers.scheduler.messages import (
    ActorChanged,
    ActorReady,
    InstanceReport,
    Orders,
    Topology,
)


def first_orders(topology: Topology) -> Orders:
    """Return the orders of a run's beginning: everyone has the devices of home, guests are
    stopped."""
    guests = topology.guests
    devices = tuple(() if n in guests else home for n, home in enumerate(topology.instances))
    own = topology.actor[: topology.home.world_size]
    held = [Holding(holder=instance_name(n), devices=has) for n, has in enumerate(devices) if has]
    return Orders(devices=devices, held=(Holding(holder=ACTOR, devices=own), *held))


class Holdings:
    """Who may hold which device.

    Args:
        topology: devices on which everyone was launched.
        moved: called when devices have moved.
    """

    def __init__(self, topology: Topology, moved: Callable[[], None]) -> None:
        self._topology, self._moved = topology, moved
        hosts = {one: topology.hosts.get(one, 0) for one in sorted(topology.owners)}
        self.ledger = DeviceLedger(hosts, topology.owners)
        self._has_moved = False
        self.until = ""
        """the event after which devices go back to their owners"""
        self._given: dict[int, int] = {}
        """by instance: sequence of the orders that last gave it devices"""
        self._given_actor = 0
        """sequence of the orders that last gave the actor devices"""
        self._ordered_actor: set[int] = set()
        """devices that the actor has by the newest orders"""

    # -- what they may hold -------------------------------------------------------------------

    def restore(self, orders: Orders) -> None:
        """Go on from the orders of a scheduler before this one."""
        for one in orders.held:
            self.ledger.take(one.holder, one.devices)
        for device in orders.lost:
            self.ledger.lose(device)
        self._given = dict.fromkeys(range(len(self._topology.instances)), orders.sequence)
        self._given_actor = orders.sequence
        self._moved()

    def tell(self) -> None:
        """Tell whoever watches that devices have moved, where they have since the last time."""
        if self._has_moved:
            self._has_moved = False
            self._moved()

    def can_have(self, instance: int, devices: Collection[int]) -> bool:
        """Whether an instance may take these devices: nobody else holds one of them."""
        return self.ledger.can_take(instance_name(instance), devices)

    def of_instance(self, instance: int) -> tuple[int, ...]:
        """Return the devices that an instance may hold."""
        return self.ledger.held_by(instance_name(instance))

    def of_actor(self, ready: ActorReady) -> tuple[int, ...]:
        """Return the devices of the actor, as rank 0 said last."""
        return self._topology.actor[: ready.strategy.world_size] if ready.holds else ()

    def knows_actor(self, ready: ActorReady) -> bool:
        """Whether every rank has said that it holds what rank 0 says, and no more."""
        return set(self.ledger.held_by(ACTOR)) == set(self.of_actor(ready))

    # -- orders -------------------------------------------------------------------------------

    def give(self, instance: int, devices: Collection[int], sequence: int) -> None:
        """Note the orders that give an instance devices; raises `DeviceTaken`."""
        self.ledger.take(instance_name(instance), devices, until=self.until)
        self._given[instance] = sequence
        self._has_moved = True

    def can_give_actor(self, ranks: int) -> bool:
        """Whether the actor may take the devices of its first ``ranks`` ranks: nobody else holds
        one of them."""
        return self.ledger.can_take(ACTOR, self._topology.actor[:ranks])

    def give_actor(self, ranks: int, sequence: int) -> None:
        """Note the orders that leave the actor the devices of its first ``ranks`` ranks; 0: it
        lends them all. Raises `DeviceTaken`."""
        wanted = self._topology.actor[:ranks]
        self.ledger.take(ACTOR, wanted, until=self.until)
        if not self._ordered_actor.issuperset(wanted):
            self._given_actor = sequence
        self._ordered_actor = set(wanted)
        self._has_moved = True

    def lose(self, device: int) -> None:
        """Note that a device is lost: nobody can take it."""
        self.ledger.lose(device)
        self._has_moved = True

    # -- reports ------------------------------------------------------------------------------

    def note(self, report: InstanceReport) -> None:
        """Take what an instance says that it holds."""
        if report.sequence >= self._given.get(report.instance, 0):
            self._keep(instance_name(report.instance), report.devices)

    def note_rank(self, report: ActorChanged) -> None:
        """Take what a rank of the actor says that it holds."""
        if report.sequence < self._given_actor:
            return
        active = report.strategy.world_size if report.holds else 0
        ranks = self._topology.ranks_of(report.rank)
        released = {self._topology.actor[rank] for rank in ranks if rank >= active}
        held = self.ledger.held_by(ACTOR)
        self._keep(ACTOR, [one for one in held if one not in released])

    def _keep(self, holder: str, devices: Collection[int]) -> None:
        self._has_moved |= bool(self.ledger.keep(holder, devices))
