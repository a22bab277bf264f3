"""`ScalingDecision`: what changes now, as a policy decides it.

Carried out in this order::

    stop        these instances interrupt, put their requests back, and release their devices
    actor       takes the devices of the strategy and reshards, or offloads and lends its devices
    resume      these instances take devices, load the newest weights, and serve
    migrations  requests move between instances that serve
    order       requests that are waiting, which first
"""

from __future__ import annotations

from collections import Counter

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.state import (
    ACTOR,
    ActorState,
    ClusterState,
    InstanceState,
    instance_name,
)


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that serves from now on; one that serves already changes its devices."""

    instance: int
    devices: tuple[int, ...]


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that leave an instance with the tokens they have."""

    source: int
    """instance that they leave"""
    target: int | None = None
    """instance that takes them; None: whichever has room"""
    count: int = 0
    """number of requests, those with the most tokens to come first; 0: by name"""
    names: tuple[str, ...] = ()


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. As it is by default, nothing changes."""

    iteration: int = 0
    stop: tuple[int, ...] = ()
    """instances"""
    actor: Strategy | None = None
    """strategy of the actor from now on; None: as it is"""
    actor_holds: bool | None = None
    """False: the actor offloads and others may hold its devices; True: it takes them again; None:
    as it is"""
    actor_waits: bool = False
    """the actor does not begin its next mini-batch, though its samples are there: the policy is
    asked again once more samples are generated"""
    resume: tuple[Resume, ...] = ()
    migrations: tuple[Migration, ...] = ()
    order: tuple[str, ...] = ()
    """names of requests, the first to be served first; others come after them"""
    reason: str = ""
    """for the log and the trace"""

    @property
    def changes_devices(self) -> bool:
        """Whether somebody gets or loses devices."""
        return bool(self.stop or self.resume) or (self.actor, self.actor_holds) != (None, None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.changes_devices or self.migrations or self.order or self.actor_waits)


class InvalidDecision(ValueError):
    """A decision that cannot be carried out; the message has a line for each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def actor_after(decision: ScalingDecision, actor: ActorState) -> ActorState:
    """Return the actor as it is once the decision is carried out."""
    holds = actor.holds if decision.actor_holds is None else decision.actor_holds
    strategy = decision.actor or actor.strategy
    return msgspec.structs.replace(actor, holds=holds, strategy=strategy)


def holdings_after(decision: ScalingDecision, state: ClusterState) -> dict[str, tuple[int, ...]]:
    """Return the devices of the actor and of every instance once the decision is carried out; those
    that an instance is to release and may still hold are its own."""
    resumed = {one.instance: one.devices for one in decision.resume}
    holds = actor_after(decision, state.actor).holds
    found = {ACTOR: state.actor.needs(decision.actor) if holds else ()}
    for one in state.instances:
        kept = () if one.number in decision.stop else one.devices
        found[instance_name(one.number)] = resumed.get(one.number, kept)
    return found


def validate(decision: ScalingDecision, state: ClusterState) -> list[str]:
    """Return what is wrong with a decision, one line each; nothing: it can be carried out."""
    faults = [*_actor_faults(decision, state), *_instance_faults(decision, state)]
    return faults or [
        *_device_faults(decision, state),
        *_migration_faults(decision, state),
        *_service_faults(decision, state),
    ]


def check(decision: ScalingDecision, state: ClusterState) -> None:
    """Raise `InvalidDecision` unless the decision can be carried out."""
    faults = validate(decision, state)
    if faults:
        raise InvalidDecision(faults)


def _actor_faults(decision: ScalingDecision, state: ClusterState) -> list[str]:
    faults: list[str] = []
    actor = state.actor
    changed = actor_after(decision, actor)
    new = decision.actor
    if new is not None and new not in actor.strategies:
        known = sorted({one.dp for one in actor.strategies})
        faults.append(
            f"the actor's strategy dp={new.dp} tp={new.tp} pp={new.pp} is not one that fits model "
            f"and mini-batch (data-parallel sizes that do: {known})"
        )
    if changed.strategy.world_size > len(actor.devices):
        faults.append(
            f"the actor's strategy needs {changed.strategy.world_size} ranks, but "
            f"{len(actor.devices)} were launched"
        )
    moves = changed.holds != actor.holds or (changed.holds and changed.strategy != actor.strategy)
    if decision.actor_waits and not state.unfinished:
        faults.append("nothing is left to generate, but the actor is to wait for more samples")
    all_answer = all(one.answers for one in state.instances) and not state.lost
    waits = actor.ready and state.phase == "step" and not state.unfinished
    if waits and not changed.holds and all_answer:
        faults.append("nothing is left to generate, but the actor does not hold its devices")
    if moves and not actor.ready:
        faults.append("the actor is not at a boundary between mini-batches: it cannot change now")
    return faults


def _instance_faults(decision: ScalingDecision, state: ClusterState) -> list[str]:
    faults: list[str] = []
    resumed = [one.instance for one in decision.resume]
    instances = {one.number: one for one in state.instances}
    for what, numbers in (("stop", list(decision.stop)), ("resume", resumed)):
        counts = Counter(numbers)
        for number in sorted(set(numbers)):
            instance = instances.get(number)
            if counts[number] > 1:
                faults.append(f"{what} names instance {number} more than once")
            if instance is None:
                faults.append(f"{what} names instance {number}: there is none of this number")
            elif not instance.answers and (what == "stop" or instance.serves):
                faults.append(f"{what} names instance {number}, which does not answer")
            elif what == "stop" and not instance.serves:
                faults.append(f"stop names instance {number}, which is stopped already")
    faults += [
        f"instance {number} is to stop and to resume in one decision"
        for number in sorted(set(decision.stop) & set(resumed))
    ]
    return faults


def _device_faults(decision: ScalingDecision, state: ClusterState) -> list[str]:
    faults: list[str] = []
    instances = {one.number: one for one in state.instances}
    for each in decision.resume:
        instance = instances.get(each.instance)
        if instance is not None and not instance.fits(len(each.devices)):
            sizes = sorted({len(instance.home), *instance.sizes})
            faults.append(
                f"instance {each.instance} cannot serve on {len(each.devices)} devices "
                f"(it can on: {sizes})"
            )
        elif instance and not instance.sizes and set(each.devices) != set(instance.home):
            faults.append(
                f"instance {each.instance} cannot serve on devices {list(each.devices)} "
                f"(it can on those of its home alone: {list(instance.home)})"
            )
    holder: dict[int, str] = {}
    known = state.hosts or dict.fromkeys(state.actor.devices, 0) | {
        device: 0 for one in state.instances for device in (*one.home, *one.devices)
    }
    before = {device for one in state.instances for device in one.devices} | set(state.actor.held)
    for name, devices in holdings_after(decision, state).items():
        for device in devices:
            if device not in known:
                faults.append(f"{name} is given device {device}: there is none of this number")
            elif device in state.lost and device not in before:
                faults.append(f"{name} is given device {device}, which is lost")
            elif device in holder:
                faults.append(f"device {device} is given to both {holder[device]} and {name}")
            holder.setdefault(device, name)
    return faults


def _service_faults(decision: ScalingDecision, state: ClusterState) -> list[str]:
    """Somebody has to serve while there is something to generate, if anybody can; and after an
    iteration, for what comes next: an evaluation, or requests of the next one."""
    holder = {
        device: name
        for name, devices in holdings_after(decision, state).items()
        for device in devices
    }
    resumed = {one.instance for one in decision.resume if one.devices}

    def can_have(one: InstanceState, devices: tuple[int, ...]) -> bool:
        holders = {holder.get(device) for device in devices}
        return holders <= {None, instance_name(one.number)} and not set(devices) & set(state.lost)

    def comes(one: InstanceState) -> bool:
        return bool(one.due) and can_have(one, one.due)

    serves = any(
        one.number in resumed or (one.number not in decision.stop and (one.serves or comes(one)))
        for one in state.instances
    )
    able = any(can_have(one, one.home) for one in state.instances)
    if serves:
        return []
    if state.phase == "end":
        return ["no instance would serve after the iteration"] if able else []
    if not state.unfinished or not (decision.changes_devices or able):
        return []
    return [f"no instance would serve, but {state.unfinished} samples are unfinished"]


def _migration_faults(decision: ScalingDecision, state: ClusterState) -> list[str]:
    faults: list[str] = []
    stays = {one.number for one in state.serving}.difference(decision.stop)
    serving = stays.union(one.instance for one in decision.resume if one.devices)
    before = {one.number for one in state.serving}
    for each in decision.migrations:
        if each.source not in before:
            faults.append(f"a migration leaves instance {each.source}, which does not serve")
        if each.target is not None and each.target not in serving:
            faults.append(f"a migration goes to instance {each.target}, which will not serve")
        if each.target == each.source:
            faults.append(f"a migration goes from instance {each.source} to itself")
        if each.count < 0 or not (each.count or each.names):
            faults.append(f"a migration of instance {each.source} names no requests")
    if len(set(decision.order)) < len(decision.order):
        faults.append("order names a request more than once")
    return faults
