"""What a scaling policy decides by, and what it decides: plain data, which can travel.

Devices are numbered over the whole cluster. A rollout *instance* is one engine; it serves on the
devices that it holds, or is stopped and holds none. The ranks of the actor have one device each, in
order: under a strategy of ``n`` ranks the first ``n`` are held. An instance and a rank of the actor
may be launched on the same device; at any time one of them holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from rlinf_async.parallel import Strategy


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A holder and its devices."""

    holder: str
    devices: tuple[int, ...]


class DeviceLoan(msgspec.Struct, frozen=True, kw_only=True):
    """A device that somebody holds for a while."""

    device: int
    lender: str
    borrower: str
    until: str
    """the event that ends it, such as ``end of iteration 7``"""


class DeviceTaken(RuntimeError):
    """A device was asked for that somebody else holds, or that there is not."""


class DeviceLedger:
    """Knows the holder of every device of a run.

    Invariants: a device has one holder at most; a loan is of a device that somebody else holds than
    its owner. A change is made whole or not at all.

    Args:
        hosts: number of each device -> its host.
        owners: number of each device -> who has it between two iterations; who holds another's
            device has borrowed it.
    """

    def __init__(self, hosts: Mapping[int, int], owners: Mapping[int, str] | None = None) -> None:
        self.hosts = dict(hosts)
        self._owners = dict(owners or {})
        self._holder: dict[int, str] = {}
        self._until: dict[int, str] = {}
        self._lost: set[int] = set()
        self._held: dict[str, set[int]] = {}
        """devices of each holder"""

    # -- looking ------------------------------------------------------------------------------

    def holder(self, device: int) -> str | None:
        """Return who holds it; None: it is free."""
        return self._holder.get(device)

    def held_by(self, holder: str) -> tuple[int, ...]:
        """Return the devices of a holder, by number."""
        return tuple(sorted(self._held.get(holder, ())))

    def can_take(self, holder: str, devices: Iterable[int]) -> bool:
        """Whether each of these devices is free, or this holder's already."""
        return all(
            one in self.hosts and one not in self._lost and self._holder.get(one, holder) == holder
            for one in devices
        )

    @property
    def free(self) -> tuple[int, ...]:
        """Devices that nobody holds, lost ones left out."""
        taken = self._lost.union(self._holder)
        return tuple(one for one in self.hosts if one not in taken)

    @property
    def lost(self) -> tuple[int, ...]:
        """Devices that nobody can hold any more."""
        return tuple(sorted(self._lost))

    def holdings(self) -> tuple[Holding, ...]:
        """Return every holder with its devices, by name."""
        return tuple(
            Holding(holder=name, devices=self.held_by(name))
            for name in sorted(self._held)
            if self._held[name]
        )

    def loans(self) -> tuple[DeviceLoan, ...]:
        """Return the loans, by device."""
        return tuple(
            DeviceLoan(device=one, lender=owner, borrower=holder, until=self._until.get(one, ""))
            for one, holder in sorted(self._holder.items())
            if (owner := self._owners.get(one, holder)) != holder
        )

    # -- changing -----------------------------------------------------------------------------

    def take(self, holder: str, devices: Iterable[int], *, until: str = "") -> None:
        """Give devices that are free, or the holder's already, to a holder.

        ``until``: the event after which those that are another's go back. Raises `DeviceTaken`;
        then nothing has changed.
        """
        wanted = tuple(devices)
        self._check(holder, wanted)
        for one in wanted:
            self._holder[one] = holder
            self._until[one] = until
        self._held.setdefault(holder, set()).update(wanted)

    def release(self, holder: str, devices: Iterable[int] | None = None) -> tuple[int, ...]:
        """Free devices of a holder (None: all), and return them.

        Raises `DeviceTaken` where it does not hold one of them; then nothing has changed.
        """
        given = self.held_by(holder) if devices is None else tuple(dict.fromkeys(devices))
        for one in given:
            if self._holder.get(one) != holder:
                raise DeviceTaken(f"{holder} cannot release device {one}: {self._holder_text(one)}")
        for one in given:
            del self._holder[one]
            self._held[holder].discard(one)
        return given

    def keep(self, holder: str, devices: Iterable[int]) -> tuple[int, ...]:
        """Free all devices of a holder but these, and return them."""
        kept = set(devices)
        return self.release(holder, [one for one in self.held_by(holder) if one not in kept])

    def lose(self, device: int) -> str | None:
        """Note that nobody can take a device any more; return who holds it: whoever does may not
        know, and holds it until it is released."""
        self._lost.add(device)
        return self._holder.get(device)

    def found(self, device: int) -> None:
        """Note that a lost device is back."""
        self._lost.discard(device)

    def _check(self, holder: str, wanted: tuple[int, ...]) -> None:
        if len(set(wanted)) < len(wanted):
            raise DeviceTaken(f"{holder} asks for a device twice: {list(wanted)}")
        for one in wanted:
            if one not in self.hosts:
                raise DeviceTaken(
                    f"{holder} cannot hold device {one}: there is none of this number"
                )
            if one in self._lost:
                raise DeviceTaken(f"{holder} cannot hold device {one}: it is lost")
            if self._holder.get(one, holder) != holder:
                raise DeviceTaken(f"{holder} cannot hold device {one}: {self._holder_text(one)}")

    def _holder_text(self, device: int) -> str:
        holder = self._holder.get(device)
        return "nobody holds it" if holder is None else f"{holder} holds it"


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
    """whether the instance is to release its devices, and has not said that it has"""
    due: tuple[int, ...] = ()
    """devices on which the instance serves as soon as nobody else may hold one of them"""
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
    """whether the instance has reported in time; one that has not cannot be stopped, nor get other
    devices while it serves"""

    @property
    def serves(self) -> bool:
        """Whether the instance answers requests."""
        return bool(self.devices) and not self.stopping

    @property
    def load(self) -> int:
        """Number of requests that are here."""
        return self.running + self.waiting

    def fits(self, devices: int) -> bool:
        """Whether the instance can serve on ``devices`` devices."""
        return devices == len(self.home) or devices in self.sizes


class ActorState(msgspec.Struct, frozen=True, kw_only=True):
    """The actor."""

    devices: tuple[int, ...]
    """the device of each launched rank; a strategy of ``n`` ranks holds the first ``n``"""
    strategy: Strategy
    """strategy in force, or the one that the actor comes back with while its devices are lent"""
    home: Strategy
    """strategy in force between two iterations"""
    strategies: tuple[Strategy, ...]
    """all that can share a mini-batch and fit the model"""
    holds: bool = True
    """whether the actor holds its devices; else it is offloaded, and others may hold them"""
    mini_batches: int = 1
    """mini-batches of an iteration, over all epochs"""
    mini_batches_done: int = 0
    epochs: int = 1
    """passes over the samples of an iteration"""
    arrived: int | None = None
    """samples that it has received and not trained; None: not known"""
    ready: bool = False
    """whether the actor is at a boundary between mini-batches, where its strategy can change now"""

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
    """seconds of a decoding step of an instance at home, without what each sequence adds"""
    sequence_seconds: float = 0.0
    """seconds that each running sequence adds to a decoding step"""
    wider: float = 0.6
    """an instance on ``n`` times as many devices decodes ``n ** wider`` times as fast"""
    prefill_seconds: float = 0.0
    """seconds for each token that an instance reads before it goes on with another's response"""
    train_seconds: float = 0.0
    """seconds of a forward and backward pass of one token on one device"""
    mini_batch_seconds: float = 0.0
    """seconds of an optimizer step"""
    rescale_seconds: float = 0.0
    """seconds of a change of the actor's strategy, or of lending its devices and taking them back
    """
    move_seconds: float = 0.0
    """seconds of stopping an instance and continuing its requests elsewhere"""

    def token_seconds(self, running: float, width: float = 1.0) -> float:
        """Return the seconds of a decoding step on ``width`` times the devices of home."""
        step: float = (self.decode_seconds + running * self.sequence_seconds) / width**self.wider
        return step

    @property
    def known(self) -> bool:
        """Whether throughput can be predicted."""
        return self.decode_seconds + self.sequence_seconds > 0.0 and self.train_seconds > 0.0


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run by which a policy decides."""

    time: float
    """seconds, by the loop's clock"""
    iteration: int
    phase: Literal["begin", "step", "end"]
    """``begin``: an iteration begins, nothing of it is generated; ``end``: it was trained"""
    samples: int
    """samples of an iteration"""
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
    """holdings of the ledger"""
    loans: tuple[DeviceLoan, ...] = ()
    """loans of the ledger"""

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
        """Whether an instance was launched on devices that are the actor's between iterations."""
        own = set(self.actor.devices[: self.actor.home.world_size])
        return not own.isdisjoint(instance.home)


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
    """One decision of a policy. With its defaults, nothing changes.

    Carried out in this order::

        stop        these instances interrupt, put their requests back, and release their devices
        actor       takes the devices of the strategy and reshards, or offloads and lends its own
        resume      these instances take devices, load the newest weights, and serve
        migrations  requests move between instances that serve
        order       requests that are waiting, which first
    """

    iteration: int = 0
    stop: tuple[int, ...] = ()
    """instances to stop"""
    actor: Strategy | None = None
    """strategy of the actor from now on; None: as it is"""
    actor_holds: bool | None = None
    """whether the actor takes its devices again (True) or offloads, and others may hold them
    (False); None: as it is"""
    actor_waits: bool = False
    """the actor does not begin its next mini-batch, though its samples are there: the policy is
    asked again once more samples are generated"""
    resume: tuple[Resume, ...] = ()
    migrations: tuple[Migration, ...] = ()
    order: tuple[str, ...] = ()
    """names of requests, the first to be served first; others come after them"""
    reason: str = ""
    """reason of the decision, for the log and the trace"""

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
