"""Runs with random faults, by seed, and what must hold of each.

::

    seed --> loop order, policy, faults: deaths of rollout workers and of the scheduler, instances
             that do not answer or do not stop for a while, a policy that raises, strategies that
             fail; devices that move in any way that is valid, requests that are ordered and moved
             at random; an actor that lends its device
         --> every sample is generated; every iteration trains on all of its own, on-policy; no
             device is held twice, by what the workers themselves do
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from typing import Any, ClassVar

import msgspec

import rlinf_async as ra
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ClusterState,
    Migration,
    Resume,
    ScalingDecision,
    ScalingPolicy,
    SchedulingConfig,
    load_policy,
    validate,
)
from rlinf_async.testing import run as run_seeded
from rlinf_async.workers.scheduler import (
    DevicesReport,
    SchedulerWorker,
)
from tests.runtime.mortal import MortalBackend
from tests.workers.scheduler.kit import ENGINE, SMALL, TRAINER, WIDE, Ran, Rollout, Run, Site
from tests.workers.scheduler.registered import registered

ITERATIONS = 2
POLICIES = ("tail", "greedy", "longest_first", "turns")
LIMITS = SchedulingConfig(policy="tail", answer_seconds=2.0, stop_seconds=4.0, change_seconds=6.0)


def trained_once(ran: Ran, iterations: int = ITERATIONS, site: Site = SMALL) -> None:
    """Every sample was generated, and every iteration trained on all of its own."""
    samples = site.batches.samples
    assert len(ran.samples) == iterations * samples
    assert len(ran.reports) == iterations
    for reports in ran.reports:
        assert sum(one.samples for one in reports) == samples
        assert len({one.version for one in reports}) == 1
        assert max(one.lag_max for one in reports) == 0


class Devices:
    """Who holds which device, as the workers themselves know it."""

    def __init__(self, site: Site = SMALL) -> None:
        self.site = site
        self.rollout: dict[int, tuple[int, ...]] = {}
        """of each instance"""
        self.actor: dict[int, int] = {}
        """data parallel size, by rank"""
        self.lent: set[int] = set()
        """ranks of the actor that have offloaded"""
        self.wrong: list[str] = []

    def has(self, instance: int, devices: tuple[int, ...]) -> None:
        """An instance holds these from now on."""
        self.rollout[instance] = devices
        self.check()

    def check(self) -> None:
        """Note it where two hold a device."""
        actor = self.site.actor
        ranks = [
            rank
            for rank in range(len(actor))
            if rank < self.actor.get(rank, 1) and rank not in self.lent
        ]
        held = Counter(actor[rank] for rank in ranks)
        held.update(device for devices in self.rollout.values() for device in devices)
        if twice := [device for device, count in held.items() if count > 1]:
            self.wrong.append(f"devices {twice} are held twice: {self.rollout}, actor {ranks}")


class Slow(Rollout):
    """Takes its time to stop, now and then more than it may."""

    chance: ClassVar[random.Random]
    held: ClassVar[Devices]

    async def setup(self) -> None:
        await super().setup()  # it may be another one, after the death of the first
        homes = (*self.held.site.instances, self.held.site.actor[:1])
        self.held.has(self.rank, () if self.stopped else homes[self.rank])

    async def stop(self, hand_back: bool = False) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 1.0, 7.0)))
        await super().stop(hand_back)
        self.held.has(self.rank, ())

    async def resume(self, devices: tuple[int, ...] | None = None) -> None:
        assert devices is not None
        self.held.has(self.rank, devices)
        await super().resume(devices)


class Unsteady:
    """A policy that raises after a while."""

    def __init__(self, after: int) -> None:
        self._left, self._tail = after, load_policy("tail")

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the policy fails")
        return self._tail.decide(state)


class Mixing:
    """Another policy, and besides anything else that can be carried out, at random."""

    orders = True

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._other = load_policy(chance.choice((*POLICIES, "static")))

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        decision, chance = self._other.decide(state), self._chance
        names = [one.name for one in state.queued_requests]
        chance.shuffle(names)
        if chance.random() < 0.5:
            other = self._any(state)
            decision = decision if validate(other, state) else other
        return msgspec.structs.replace(decision, order=tuple(names))

    def _any(self, state: ClusterState) -> ScalingDecision:
        chance, actor = self._chance, state.actor
        known = sorted(state.hosts or {device for one in state.instances for device in one.home})
        changing = [one for one in state.instances if chance.random() < 0.4]
        stop = [one.number for one in changing if one.serves and chance.random() < 0.5]
        others = [one for one in changing if one.number not in stop]
        sizes = {one.number: chance.choice((len(one.home), *one.sizes)) for one in others}
        resume = [
            Resume(instance=number, devices=tuple(chance.sample(known, size)))
            for number, size in sizes.items()
        ]
        moves = actor.ready and chance.random() < 0.5
        return ScalingDecision(
            iteration=state.iteration,
            stop=tuple(stop),
            resume=tuple(resume),
            actor=chance.choice(actor.strategies) if moves else None,
            actor_holds=chance.choice((None, True, False)) if moves else None,
            actor_waits=bool(state.unfinished) and chance.random() < 0.2,
            migrations=self._moves(state, stop),
        )

    def _moves(self, state: ClusterState, stop: Collection[int]) -> tuple[Migration, ...]:
        chance = self._chance
        serving = [one for one in state.serving if one.number not in stop]
        full = [one for one in serving if one.requests and one.answers]
        if not full or state.phase != "step" or chance.random() < 0.5:
            return ()
        source = chance.choice(full)
        target = chance.choice([None, *(one.number for one in serving if one is not source)])
        here = [one.name for one in source.requests]
        some = tuple(chance.sample(here, chance.randint(1, len(here))))
        return (Migration(source=source.number, target=target, names=some),)


class Unsure(SchedulerWorker):
    """Has any policy, now and then one that fails."""

    chance: ClassVar[random.Random]
    strange: ClassVar[bool]
    """a policy was not a built-in one"""

    def make_policy(self) -> ScalingPolicy:
        if self.chance.random() < 0.3:
            type(self).strange = True
            return Unsteady(self.chance.randrange(8))
        if self.chance.random() < 0.5:
            type(self).strange = True
            return Mixing(self.chance)
        return load_policy(self.chance.choice(POLICIES))


class Failing(ToyTrainer):
    """Cannot apply some strategies, the same on every rank."""

    seed: ClassVar[int | None] = None
    held: ClassVar[Devices]

    def rescale(self, strategy: Strategy, **options: Any) -> RescaleReport:
        what = f"{self.seed} {self.version} {strategy.dp}"
        first = self.version == 0 and strategy.dp == 1
        if self.seed is not None and not first and random.Random(what).random() < 0.5:
            raise MemoryError("no room for the shards")
        report = super().rescale(strategy, **options)
        self.held.actor[self._rank] = strategy.dp
        self.held.check()
        return report

    def offload(self, *, keep_weights: bool = False) -> None:
        super().offload(keep_weights=keep_weights)
        self.held.lent.add(self._rank)

    def onload(self) -> None:
        super().onload()
        self.held.lent.discard(self._rank)
        self.held.check()


def try_seed(seed: int) -> None:
    """Run the program of this seed; raises what does not hold."""
    chance = random.Random(seed)
    site = chance.choice((SMALL, SMALL, SMALL, WIDE))
    devices, beside = Devices(site), [device for one in site.instances for device in one]
    Slow.chance = Unsure.chance = chance
    Slow.held = Failing.held = devices
    Unsure.strange = False
    Failing.seed = seed if chance.random() < 0.3 else None

    async def body() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend) as cluster:
            slots = chance.choice((2, 5, 8))
            engine = msgspec.structs.replace(ENGINE, slots=slots)
            guest = chance.random() < 0.5
            run = Run(
                cluster,
                site=site,
                engine=engine,
                trainer=msgspec.structs.replace(
                    TRAINER, seconds_per_token=chance.choice((0.0, 0.01, 0.05))
                ),
                config=msgspec.structs.replace(
                    LIMITS, on_stop=chance.choice(("migrate", "migrate", "wait"))
                ),
                rollout=Slow,
                scheduler=Unsure,
                guest=guest,
                sizes=(1, 2),
                restarts=chance.choice((0, 1, 5)),
            )
            await run.start()

            async def kill() -> None:
                rollouts = [f"Rollout[{number}]" for number in range(len(site.instances) + guest)]
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(chance.uniform(0.0, 20.0))
                    backend.kill(chance.choice(("Scheduler[0]", *rollouts)))

            async def lose() -> None:
                """Devices of rollout workers are lost for a while, as the scheduler is told."""
                for _ in range(chance.choice((0, 0, 1, 2))):
                    await asyncio.sleep(chance.uniform(0.0, 20.0))
                    devices = tuple(chance.sample(beside, chance.randint(1, 2)))
                    with run.reports.sender.clone("who watches hosts") as watching:
                        for report in (DevicesReport(lost=devices), DevicesReport(found=devices)):
                            for _ in range(4):  # a scheduler that dies may have read it
                                await watching.put(report)
                                await asyncio.sleep(chance.uniform(0.0, 5.0))

            faults = [asyncio.create_task(one()) for one in (kill, lose)]
            try:
                ran = await run.train(ITERATIONS)
                trained_once(ran, site=site)
                assert ran.summary is not None
                why = ran.summary.policy_fault
                assert Unsure.strange or not why or "was given up" in why, why
            finally:
                for fault in faults:
                    fault.cancel()

    with registered("toy", Failing):
        run_seeded(body(), seed=seed)
    assert not devices.wrong, devices.wrong
