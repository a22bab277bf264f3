"""`Site`: what a simulation watches of its workers, beside what they do: usage, decisions,
invariants.

All of them are in this process, so nothing of this travels, and nothing of it is decided here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.backends.cost.trainer import CostTrainer
from rlinf_async.messages.language import Sample
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ACTOR,
    ClusterState,
    DeviceLedger,
    Rates,
    ScalingDecision,
    SchedulingConfig,
    instance_name,
)
from rlinf_async.simulate.config import SimulationConfig
from rlinf_async.workers.scheduler import (
    SchedulerWorker,
    Topology,
)


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Number of devices held and used by everyone, from a time on."""

    time: float
    held: dict[str, int]
    busy: dict[str, int]
    left: int
    """samples of the iteration that are not generated"""


class Usage:
    """Integrals over virtual time of how many devices each role holds, and has busy."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._loop = asyncio.get_running_loop()
        self._began = self._at = self._loop.time()
        self._held: dict[str, int] = {}
        self.held: dict[str, float] = {}
        """device-seconds, by role"""
        self.busy: dict[str, float] = {}
        """device-seconds, by role"""
        self.spent: dict[str, float] = {}
        """device-seconds, by cause"""
        self.history: list[Moment] = []

    def note(self, busy: dict[str, int], left: int) -> None:
        """Add the present moment to the history."""
        moment = Moment(
            time=self._loop.time() - self._began, held=dict(self._held), busy=busy, left=left
        )
        self.history.append(moment)

    def restart(self) -> None:
        """Begin here: forget all device-seconds so far."""
        self._began = self._at = self._loop.time()
        self.held, self.busy, self.spent = {}, {}, {}

    def holds(self, **devices: int) -> None:
        """Note how many devices each role holds from now on."""
        now = self._loop.time()
        for role, count in self._held.items():
            self.held[role] = self.held.get(role, 0.0) + count * (now - self._at)
        self._at = now
        self._held = self._held | devices

    def worked(self, role: str, device_seconds: float) -> None:
        """Note that devices were busy."""
        self.busy[role] = self.busy.get(role, 0.0) + device_seconds

    def spend(self, cause: str, device_seconds: float) -> None:
        """Note what device-seconds were spent on."""
        self.spent[cause] = self.spent.get(cause, 0.0) + device_seconds

    def spent_by(self, engine: CostEngine) -> None:
        """Note what an engine has spent since the last time."""
        for cause, seconds in engine.take_spent().items():
            self.spend(cause, seconds)
            if cause == "decoding":
                self.worked("rollout", seconds)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._loop.time() - self._began

    def bubbles(self) -> dict[str, float]:
        """Return the share of the held device-seconds in which nothing was computed, by role; under
        ``cluster`` that of all devices, held or not."""
        self.holds()
        found = {
            role: 1.0 - min(1.0, self.busy.get(role, 0.0) / held)
            for role, held in sorted(self.held.items())
            if held > 0.0
        }
        everything = self.devices * self.seconds
        found["cluster"] = 1.0 - sum(self.busy.values()) / everything if everything else 0.0
        return found


ANSWER_SECONDS = 120.0
"""seconds of virtual time in which a worker must answer: slow nodes take their time, and none is
deaf"""
CHANGE_SECONDS = 3600.0
"""limit of stops and changes, in seconds of virtual time: none takes as long"""


def topology(config: SimulationConfig) -> Topology:
    """Return who is on which devices: the actor on the first ones and, while it grows, on all;
    instances on all, those on the actor's own are its guests."""
    hardware, shared = config.hardware, config.shared_devices
    size, tp = hardware.instance_devices, hardware.actor_tp
    strategies = tuple(Strategy(dp=dp, tp=tp) for dp in config.dp_sizes)
    return Topology(
        instances=tuple(tuple(range(n, n + size)) for n in range(0, shared, size)),
        actor=tuple(range(shared)),
        home=Strategy(dp=hardware.actor_devices // tp, tp=tp),
        strategies=strategies,
        samples=config.samples,
        group=config.work.group_size,
        hosts={n: n // hardware.devices_per_host for n in range(shared)},
        sizes=tuple(width * size for width in hardware.instance_widths),
        workers=max(config.dp_sizes),
    )


def scheduling(config: SimulationConfig) -> SchedulingConfig:
    """Return the scheduler's settings; rates and lengths are known, as from earlier runs."""
    generation, actor = config.generation, config.actor
    return SchedulingConfig(
        policy=config.scheduler.policy,
        every=config.scheduler.every,
        answer_seconds=ANSWER_SECONDS,
        stop_seconds=CHANGE_SECONDS,
        change_seconds=CHANGE_SECONDS,
        rates=Rates(
            decode_seconds=generation.decode_seconds,
            sequence_seconds=generation.sequence_seconds,
            wider=generation.wider,
            prefill_seconds=generation.prefill_seconds,
            train_seconds=actor.token_seconds + actor.sample_seconds / config.mean_tokens,
            mini_batch_seconds=actor.step_seconds,
            rescale_seconds=actor.rescale_seconds + actor.move_seconds,
            move_seconds=2 * generation.move_seconds,
        ),
        lengths=tuple(generation.lengths.many(4096, 1).tolist()),
    )


class Generates(Protocol):
    """A rollout worker."""

    @property
    def engine(self) -> CostEngine:
        """The engine of the moment."""
        ...


class Trains(Protocol):
    """An actor."""

    @property
    def trainer(self) -> CostTrainer:
        """Trainer of all ranks that the worker stands for."""
        ...


class GradientSync:
    """Data ranks wait for one another at the end of each mini-batch, as its all-reduce has them."""

    def __init__(self) -> None:
        self._arrived, self._all = 0, asyncio.Event()

    async def wait(self, ranks: int) -> None:
        """Wait until ``ranks`` ranks are here."""
        self._arrived += 1
        if self._arrived < ranks:
            await self._all.wait()
        else:
            everyone, self._arrived, self._all = self._all, 0, asyncio.Event()
            everyone.set()


class Site:
    """State of a simulation's workers, as it is watched.

    Args:
        config: the simulation's configuration.
        checked: whether invariants are held whenever devices have moved.
    """

    def __init__(self, config: SimulationConfig, *, checked: bool = False) -> None:
        self.config, self.checked = config, checked
        self.topology = topology(config)
        self.rollouts: dict[int, Generates] = {}
        self.actors: dict[int, Trains] = {}
        self.scheduler: SchedulerWorker
        self.gradients = GradientSync()
        self.usage = Usage(config.hardware.devices)
        self.decisions: list[tuple[float, ScalingDecision]] = []
        """decisions that changed something, with their time"""
        self.iteration = self.training = 0
        """ranks of the actor that train"""
        self._finished: Counter[int] = Counter()

    @property
    def ledger(self) -> DeviceLedger:
        """Ledger of who holds which device, as the scheduler knows it."""
        return self.scheduler.ledger

    @property
    def finished(self) -> int:
        """Samples of this iteration that are generated."""
        return self._finished[self.iteration]

    def generating(self) -> bool:
        """Return whether any instance decodes now."""
        return any(one.engine.running for one in self.rollouts.values())

    # -- what the workers tell it -------------------------------------------------------------

    def finished_sample(self, sample: Sample) -> None:
        """A sample was generated."""
        self._finished[sample.request.iteration] += 1

    def decided(self, state: ClusterState, decision: ScalingDecision) -> None:
        """A decision is about to be carried out."""
        if decision.changes_devices or decision.migrations:
            self.decisions.append((state.time, decision))
        self.note()

    def devices_moved(self) -> None:
        """The ledger has changed."""
        held = {one.holder: len(one.devices) for one in self.ledger.holdings()}
        actor = held.pop(ACTOR, 0)
        self.usage.holds(actor=actor, rollout=sum(held.values()))
        for number, rollout in self.rollouts.items():
            rollout.engine.hold(len(self.ledger.held_by(instance_name(number))))
        if self.checked:
            self.check()

    def trains(self, ranks: int) -> None:
        """Count ``ranks`` more ranks of the actor as training."""
        self.training += ranks
        self.note()

    @contextmanager
    def inferring(self, tokens: int) -> Iterator[float]:
        """The context in which log-probs are computed, with its seconds."""
        cost = tokens * self.config.inference.token_seconds
        yield cost / self.config.inference.devices
        self.usage.spend("inference", cost)
        self.usage.worked("inference", cost)

    def settle(self) -> None:
        """Account for what the engines have done by now."""
        for rollout in self.rollouts.values():
            self.usage.spent_by(rollout.engine)

    def settle_actors(self) -> None:
        """Account for what the actors have done by now, each for the ranks that it stands for."""
        ranks = self.config.hardware.actor_tp
        for actor in self.actors.values():
            for cause, seconds in actor.trainer.take_spent().items():
                self.usage.spend(cause, seconds * ranks)
                if cause != "resharding":
                    self.usage.worked("actor", seconds * ranks)

    def restart(self) -> None:
        """Forget what was spent before the first iteration."""
        self.settle()
        self.settle_actors()
        self.usage.restart()

    def fit(self, number: int, engine: CostEngine, devices: Sequence[int]) -> None:
        """Tell a new engine which devices its instance has; none: those of home, later."""
        engine.home = len(self.topology.instances[number])
        engine.devices = len(devices) or engine.home
        engine.width = engine.devices / engine.home

    def note(self) -> None:
        """Add the present moment to the history."""
        rollout = sum(one.engine.devices for one in self.rollouts.values() if one.engine.running)
        busy = {"rollout": rollout, "actor": self.training}
        self.usage.note(busy, self.config.samples - self.finished)

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless no device is held twice, and who works holds some."""
        held = [device for one in self.ledger.holdings() for device in one.devices]
        assert len(held) == len(set(held)) <= self.config.hardware.devices, "a device held twice"
        for number, rollout in self.rollouts.items():
            own = self.ledger.held_by(instance_name(number))
            assert own or not rollout.engine.running, f"instance {number} serves without devices"
        assert self.ledger.held_by(ACTOR) or not self.training, "the actor trains without devices"

    def check_home(self) -> None:
        """Raise AssertionError unless all ranks of the actor have the same valid strategy, that of
        home where nothing has failed."""
        self.check()
        strategies = {one.trainer.strategy for one in self.actors.values()}
        assert len(strategies) == 1, f"ranks of the actor have {strategies}"
        assert strategies <= set(self.topology.strategies), f"{strategies} are not valid"
        if not self.ledger.lost and not self.scheduler.policy.fault:
            assert strategies == {self.topology.home}, "the actor is not at home"
