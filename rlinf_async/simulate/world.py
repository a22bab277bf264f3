"""`World`: what the simulated scheduler knows of the workers, and what it changes.

The workers are in the same process, so reports do not travel: it looks at them. Decisions are
carried out through the workers' own methods: `interrupt`, `offload`, `onload`.

::

                   waits for                                  unblocked by
    begin, end     stops, resharding, loads                   the workers, virtual time
    boundary       a decision that is carried out; devices    the scheduler; progress of rollout
    mini_batch     its turn: no decision is carried out       the scheduler

Invariant: the ledger holds what the workers hold; one decision is carried out at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal

from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.channels import Channel
from rlinf_async.messages.language import Request, Sample, SampleGroup
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.language.samples import Ledger
from rlinf_async.scheduling import (
    ACTOR,
    ActorState,
    ClusterState,
    DeviceLedger,
    InstanceState,
    Migration,
    Rates,
    RequestState,
    SafePolicy,
    ScalingDecision,
    actor_after,
    holdings_after,
    instance_name,
    load_policy,
    safe,
)
from rlinf_async.scheduling.predictor import Predictor
from rlinf_async.simulate.config import SimulationConfig
from rlinf_async.simulate.usage import Usage
from rlinf_async.simulate.workers import SimulatedActor, SimulatedRollout

PATIENCE = 1.0
"""seconds for which a migration waits until its target has taken the requests"""
DETAILED = 8
"""requests for each serving instance up to which a state names every one"""


class World:
    """See the module.

    Args:
        config: of the simulation.
        report: gets the message about a policy that failed.
    """

    def __init__(self, config: SimulationConfig, report: Callable[[str], None]) -> None:
        self.config = config
        hardware = config.hardware
        self.rollouts: dict[int, SimulatedRollout] = {}
        self.actor: SimulatedActor
        self.group: WorkerGroup[SimulatedRollout]
        self.requests: Channel[Request]
        self.samples: Ledger
        self.groups: Channel[SampleGroup]
        self.policy: SafePolicy = safe(
            load_policy(config.scheduler.policy, ("scheduler", "policy")),
            config.scheduler.policy,
            report,
        )
        self.ledger = DeviceLedger(
            {n: n // hardware.devices_per_host for n in range(config.shared_devices)}
        )
        size = hardware.instance_devices
        self.homes = [
            tuple(range(first, first + size)) for first in range(0, config.shared_devices, size)
        ]
        tp = hardware.actor_tp
        self.home = Strategy(dp=hardware.actor_devices // tp, tp=tp)
        self.strategies = tuple(Strategy(dp=dp, tp=tp) for dp in config.dp_sizes)
        self.strategy, self.holds, self.ready = self.home, True, True
        self.usage = Usage(hardware.devices)
        self.iteration = self.done = self.collected = 0
        self._finished: Counter[int] = Counter()
        self.unresponsive: set[int] = set()
        """instances that do not answer"""
        self.decisions: list[tuple[float, ScalingDecision]] = []
        """those that changed something, with their time"""
        self.migrated = 0
        self._made: dict[str, int] = {}
        """tokens of requests that were put back, by name"""
        self.checked = False
        """whether invariants are held after each decision"""
        self._phase: Literal["begin", "step", "end"] = "end"
        self._lengths: deque[float] = deque(config.generation.lengths.many(4096, 1), maxlen=8192)
        self._predictor = Predictor(self._lengths)
        self._turn = asyncio.Lock()
        self._asked_at = 0
        self._returning: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._progress = asyncio.Event()

    @property
    def finished(self) -> int:
        """Samples of this iteration that are generated."""
        return self._finished[self.iteration]

    # -- what the run tells it ----------------------------------------------------------------

    async def open(self) -> None:
        """Stop the instances on the actor's devices: everybody is at home."""
        self.actor.trainer.strategy = self.home
        own = set(range(self.config.hardware.actor_devices))
        guests = [n for n, home in enumerate(self.homes) if not own.isdisjoint(home)]
        if guests:
            await self.group.call_on(guests, SimulatedRollout.stop)
        holdings = {instance_name(n): home for n, home in enumerate(self.homes) if n not in guests}
        self.ledger.assign({ACTOR: range(self.config.hardware.actor_devices), **holdings})
        self._note_holdings()

    def settle(self) -> None:
        """Account for what the engines have done by now."""
        for rollout in self.rollouts.values():
            self.usage.spent_by(rollout.engine)

    async def begin(self, iteration: int) -> None:
        """An iteration begins: nothing of it is generated."""
        self.iteration, self.done, self.collected = iteration, 0, 0
        self._asked_at = self.finished
        await self._decide("begin")
        self._phase = "step"

    async def end(self) -> None:
        """The iteration was trained."""
        self.done = self.config.work.mini_batches
        await self._decide("end")
        self._predictor = Predictor(self._lengths)

    def finished_sample(self, sample: Sample) -> None:
        """A sample was generated."""
        tokens = len(sample.generated.token_ids)
        self._lengths.append(tokens)
        self._finished[sample.request.iteration] += 1
        every = max(1, round(self.config.scheduler.every * self.config.samples))
        if self.finished - self._asked_at >= every or self.finished == self.config.samples:
            self._progress.set()

    async def follow(self) -> None:
        """Ask the policy whenever enough samples were generated."""
        while True:
            await self._progress.wait()
            self._progress.clear()
            if self._phase == "step":
                self._asked_at = self.finished
                await self._decide("step")

    async def boundary(self, arrived: int) -> None:
        """The samples of the next mini-batch are here: change what is to be changed, and wait until
        the actor holds its devices."""
        self.collected = arrived
        await self._decide("step")
        while not self.holds:
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def mini_batch(self) -> AsyncIterator[None]:
        """The context in which the actor trains, and does not change."""
        async with self._turn:
            self.ready = False
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.note()
        try:
            yield
        finally:
            seconds = (loop.time() - began) * self.strategy.world_size
            self.usage.worked("actor", seconds)
            self.usage.spend("training", seconds)
            self.ready, self.collected = True, 0
            self.done += 1
            self.note()

    async def publishing(self, seconds: float) -> None:
        """Let the time of gathering the weights of a version pass, on the actor's devices."""
        spent = seconds * self.strategy.world_size
        self.usage.spend("publishing", spent)
        self.usage.worked("actor", spent)
        await asyncio.sleep(seconds)

    @contextmanager
    def inferring(self, tokens: int) -> Iterator[float]:
        """The context in which log-probs are computed, with its seconds."""
        cost = tokens * self.config.inference.token_seconds
        yield cost / self.config.inference.devices
        self.usage.spend("inference", cost)
        self.usage.worked("inference", cost)

    # -- deciding ------------------------------------------------------------------------------

    def state(self, phase: Literal["begin", "step", "end"]) -> ClusterState:
        """What the policy sees."""
        config = self.config
        waiting = self.requests.statistics().depth
        arrived = self.collected + self.groups.statistics().depth * config.work.group_size
        detailed = config.samples - self.finished <= DETAILED * len(self.homes)
        instances = tuple(self._instance(n, detailed) for n in range(len(self.homes)))
        queued = self._queued(instances) if detailed and waiting else ()
        left = self._predictor.left(0)
        return ClusterState(
            time=asyncio.get_running_loop().time(),
            iteration=self.iteration,
            phase=phase,
            samples=config.samples,
            finished=self.finished,
            tokens=self._predictor.left(0) + config.work.prompt_tokens,
            longest=self._predictor.longest,
            group=config.work.group_size,
            queued=waiting,
            queued_expected=sum(one.expected for one in queued) if queued else waiting * left,
            queued_requests=queued,
            hosts=self.ledger.hosts,
            lost=self.ledger.lost,
            instances=instances,
            actor=ActorState(
                devices=tuple(range(config.shared_devices)),
                strategy=self.strategy,
                home=self.home,
                strategies=self.strategies,
                holds=self.holds,
                mini_batches=config.work.mini_batches,
                mini_batches_done=self.done,
                arrived=arrived,
                ready=self.ready,
            ),
            rates=self._rates(),
            holdings=self.ledger.holdings(),
            loans=self.ledger.loans(),
            sequence=len(self.decisions),
        )

    def _queued(self, instances: tuple[InstanceState, ...]) -> tuple[RequestState, ...]:
        """Return the requests that no instance has taken."""
        here = {request.name for one in instances for request in one.requests}
        names = (one.name for one in self.samples.running if one.name not in here)
        counts = ((name, self._made.get(name, 0)) for name in names)
        left = self._predictor.left
        return tuple(
            RequestState(name=name, made=made, expected=left(made)) for name, made in counts
        )

    def _rates(self) -> Rates:
        generation, actor = self.config.generation, self.config.actor
        return Rates(
            decode_seconds=generation.decode_seconds,
            sequence_seconds=generation.sequence_seconds,
            wider=generation.wider,
            prefill_seconds=generation.prefill_seconds,
            train_seconds=actor.token_seconds,
            mini_batch_seconds=actor.step_seconds,
            rescale_seconds=actor.rescale_seconds + actor.move_seconds,
            move_seconds=2 * generation.move_seconds,
        )

    def _instance(self, number: int, detailed: bool) -> InstanceState:
        home = self.homes[number]
        engine = self.rollouts[number].engine
        requests: list[RequestState] = []
        expected = 0.0
        left = self._predictor.left
        progress = engine.progress()
        for name, made, _ in progress:
            ahead = left(made)
            expected += ahead
            if detailed:
                requests.append(RequestState(name=name, made=made, expected=ahead))
        return InstanceState(
            number=number,
            home=home,
            devices=self.ledger.held_by(instance_name(number)),
            slots=engine.config.slots,
            sizes=tuple(width * len(home) for width in self.config.hardware.instance_widths),
            running=engine.running,
            waiting=engine.waiting,
            made=sum(made for _, made, _ in progress),
            expected=expected,
            requests=tuple(requests),
            answers=number not in self.unresponsive,
        )

    async def _decide(self, phase: Literal["begin", "step", "end"]) -> None:
        async with self._turn:
            if phase == "step" and self._phase == "end":
                return
            self._phase = phase
            state = self.state(phase)
            decision = self.policy.decide(state)
            if decision.changes_devices or decision.migrations:
                self.decisions.append((state.time, decision))
                await self._carry_out(decision, state)
                if self.checked:
                    self.check()
            if decision.order:
                await self._put_in_order(decision.order)
            self.note()

    async def _carry_out(self, decision: ScalingDecision, state: ClusterState) -> None:
        holdings = holdings_after(decision, state)
        if decision.stop:
            for number in decision.stop:
                self._note_made(number)
            counts = await self.group.call_on(list(decision.stop), SimulatedRollout.stop)
            self.migrated += sum(counts)
        actor = actor_after(decision, state.actor)
        if actor.strategy != self.strategy and actor.holds:
            await self._reshard(self.config.actor.rescale_seconds, actor)
        if actor.holds != self.holds:
            await self._reshard(self.config.actor.move_seconds, actor)
        self.strategy, self.holds = actor.strategy, actor.holds
        self.actor.trainer.strategy = actor.strategy
        until = f"end of iteration {self.iteration}"
        self.ledger.assign(holdings, until=until)
        self._note_holdings()
        self._changed.set()
        await asyncio.gather(*(self._resume(one.instance, state) for one in decision.resume))
        for each in decision.migrations:
            if each.source not in decision.stop:
                await self._migrate(each)

    def _note_made(self, number: int) -> None:
        self._made |= {name: made for name, made, _ in self.rollouts[number].engine.progress()}

    async def _migrate(self, migration: Migration) -> None:
        """Requests leave an instance that goes on serving. While they do, their target alone takes
        requests, so that it gets them; what it has no room for goes to whoever has."""
        source, target = migration.source, migration.target
        left = self._predictor.left
        progress = self.rollouts[source].engine.progress()
        longest = sorted(progress, key=lambda one: (-left(one[1]), one[0]))
        names = list(migration.names) or [name for name, _, _ in longest[: migration.count]]
        self._note_made(source)
        others = [n for n in self._serving() if target is not None and n not in (source, target)]
        await self.group.call_on(others, SimulatedRollout.hold)
        self.migrated += sum(await self.group.call_on([source], SimulatedRollout.hand_over, names))
        if target is not None:
            with suppress(TimeoutError):  # an engine may die in this moment
                async with asyncio.timeout(PATIENCE):
                    await self.rollouts[target].has_taken(set(names))
        await self.group.call_on([*others, source], SimulatedRollout.resume)

    def _serving(self) -> list[int]:
        return [n for n in self.rollouts if self.ledger.held_by(instance_name(n))]

    async def _put_in_order(self, order: tuple[str, ...]) -> None:
        """Put the requests that wait in this order, others after them: each goes back to the
        channel in the place of another one."""
        depth = self.requests.statistics().depth
        if depth < 2:
            return
        place = {name: at for at, name in enumerate(order)}
        async with self.requests.receiver.lease(weight=depth, at_least=1) as waiting:
            ordered = sorted(waiting, key=lambda one: place.get(one.name, len(place)))
            for at, one in enumerate(ordered):
                waiting.replace(at, one)

    async def _reshard(self, seconds: float, actor: ActorState) -> None:
        self.usage.spend("resharding", seconds * actor.strategy.world_size)
        await asyncio.sleep(seconds)

    async def _resume(self, number: int, state: ClusterState) -> None:
        instance = state.instances[number]
        width = len(self.ledger.held_by(instance_name(number))) / len(instance.home)
        if instance.serves:
            await self.rollouts[number].widen(width)
        else:
            await self.rollouts[number].begin(width)

    def _note_holdings(self) -> None:
        held = {one.holder: len(one.devices) for one in self.ledger.holdings()}
        actor = held.pop(ACTOR, 0)
        self.usage.holds(actor=actor, rollout=sum(held.values()))
        for number, rollout in self.rollouts.items():
            rollout.engine.hold(len(self.ledger.held_by(instance_name(number))))

    # -- faults --------------------------------------------------------------------------------

    async def lose_host(self, host: int, seconds: float) -> bool:
        """Stop the instances of a host, for some time; what they have made is lost. False where
        nobody else would serve, or the actor holds a device there."""
        async with self._turn:
            gone = {device for device, where in self.ledger.hosts.items() if where == host}
            serving = set(self._serving()) - self.unresponsive
            lost = [n for n in serving if gone & set(self.ledger.held_by(instance_name(n)))]
            if len(lost) == len(serving) or gone & set(self.ledger.held_by(ACTOR)):
                return False
            for number in lost:
                self.rollouts[number].engine.forget()
            if lost:
                await self.group.call_on(lost, SimulatedRollout.stop)
            for number in lost:
                self.ledger.release(instance_name(number))
            for device in sorted(gone):
                self.ledger.lose(device)
            self._note_holdings()
        back = asyncio.create_task(self._host_back(sorted(gone), lost, seconds))
        self._returning.add(back)
        back.add_done_callback(self._returning.discard)
        return True

    async def _host_back(self, devices: list[int], lost: list[int], seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            for device in devices:
                self.ledger.found(device)
            free = set(self.ledger.free)
            back = [n for n in lost if set(self.homes[n]) <= free and not self._is_guest(n)]
            for number in back:
                self.ledger.take(instance_name(number), self.homes[number])
            self._note_holdings()
            await asyncio.gather(*(self.rollouts[number].begin(1.0) for number in back))
        self._progress.set()

    def _is_guest(self, number: int) -> bool:
        return min(self.homes[number]) < self.config.hardware.actor_devices

    def fit(self, number: int, engine: CostEngine) -> None:
        """Tell a new engine which devices it has."""
        held = len(self.ledger.held_by(instance_name(number)))
        engine.devices = held
        engine.width = held / len(self.homes[number]) if held else 1.0

    def close(self) -> None:
        """End what is still to come."""
        for task in self._returning:
            task.cancel()

    def note(self) -> None:
        """Add the present moment to the history."""
        rollout = sum(one.engine.devices for one in self.rollouts.values() if one.engine.running)
        actor = 0 if self.ready else self.strategy.world_size
        self.usage.note({"rollout": rollout, "actor": actor}, self.config.samples - self.finished)

    def check(self) -> None:
        """Raise AssertionError unless everybody holds what the ledger says, and no device twice."""
        held = [device for one in self.ledger.holdings() for device in one.devices]
        assert len(held) == len(set(held)) <= self.config.hardware.devices, "a device held twice"
        assert self.strategy in self.strategies, f"{self.strategy} is not valid"
        for number, rollout in self.rollouts.items():
            own = self.ledger.held_by(instance_name(number))
            assert own or not rollout.engine.running, f"instance {number} serves without devices"
        if self._phase == "end" and not self.ledger.lost and not self.policy.fault:
            assert self.strategy == self.home, "the actor is not at home"
        size = len(self.ledger.held_by(ACTOR))
        assert size == (self.strategy.world_size if self.holds else 0), "the actor's devices"
