"""Runs with random faults, by seed, and what must hold of each.

::

    seed --> loop order, policy, faults: deaths of rollout workers and of the scheduler, instances
             that do not answer or do not stop for a while, a policy that raises, strategies that
             fail; requests that are ordered and moved at random; an actor that lends its device
         --> every sample is generated; every iteration trains on all of its own, on-policy; the
             actor is at home between iterations unless it could not go there
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import msgspec

import rlinf_async as ra
from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.messages.language import Generated, Request
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ClusterState,
    Migration,
    ScalingDecision,
    ScalingPolicy,
    load_policy,
)
from rlinf_async.testing import run as run_seeded
from rlinf_async.workers.rollout.language import LanguageRolloutReport
from rlinf_async.workers.scheduler import SchedulerWorker, SchedulingConfig
from tests.runtime.mortal import MortalBackend
from tests.workers.rollout.language_kit import Rollout
from tests.workers.scheduler.kit import BATCHES, ENGINE, Ran, Run
from tests.workers.scheduler.registered import registered

ITERATIONS = 2
LIMITS = SchedulingConfig(policy="tail", answer_seconds=2.0, stop_seconds=4.0, change_seconds=6.0)


def trained_once(ran: Ran, iterations: int = ITERATIONS) -> None:
    """Every sample was generated, and every iteration trained on all of its own."""
    assert len(ran.samples) == iterations * BATCHES.samples
    assert len(ran.reports) == iterations
    for reports in ran.reports:
        assert sum(one.samples for one in reports) == BATCHES.samples
        assert len({one.version for one in reports}) == 1
        assert max(one.lag_max for one in reports) == 0


HOME = {0: 1, 1: 2, 2: 0}
"""device of each rollout worker; that of actor rank 0 is 0, that of rank 1 is 2"""


class Devices:
    """Who holds the devices that move, as the workers themselves know it."""

    def __init__(self) -> None:
        self.rollout: set[int] = set()
        """ranks that serve"""
        self.actor: dict[int, int] = {}
        """data parallel size, by rank"""
        self.lent: set[int] = set()
        """ranks of the actor that have offloaded"""
        self.wrong: list[str] = []

    def check(self) -> None:
        """Note it where both hold a device."""
        by_actor = {0} - self.lent
        if self.actor.get(1, 1) > 1:
            by_actor |= {1} - self.lent
        taken = {(0, 2)[rank] for rank in by_actor}
        if both := taken & {HOME[rank] for rank in self.rollout}:
            self.wrong.append(f"devices {both} are held twice: {self.rollout}, {self.actor}")


class Slow(Rollout):
    """Takes its time to stop, now and then more than it may."""

    chance: ClassVar[random.Random]
    held: ClassVar[Devices]

    async def offload(self, migrate: bool = False) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 1.0, 7.0)))
        await super().offload(migrate)
        self.held.rollout.discard(self.rank)

    async def _generate(self, request: Request, report: LanguageRolloutReport) -> Generated | None:
        self.held.rollout.add(self.rank)
        self.held.check()
        return await super()._generate(request, report)


class Unsteady:
    """A policy that raises after a while."""

    def __init__(self, after: int) -> None:
        self._left, self._tail = after, load_policy("tail")

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the policy fails")
        return self._tail.decide(state)


class Shuffling:
    """As `tail`, and besides orders requests and moves them to and fro, at random."""

    orders = True

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._tail = chance, load_policy("tail")

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        decision, chance = self._tail.decide(state), self._chance
        names = [one.name for one in state.queued_requests]
        chance.shuffle(names)
        serving = [one for one in state.serving if one.number not in decision.stop]
        full = [one for one in serving if one.requests and one.answers]
        moves: tuple[Migration, ...] = ()
        if full and state.phase == "step" and not decision.changes_devices:
            source = chance.choice(full)
            others = [one.number for one in serving if one is not source]
            target = chance.choice([None, *others])
            here = [one.name for one in source.requests]
            some = tuple(chance.sample(here, chance.randint(1, len(here))))
            moves = (Migration(source=source.number, target=target, names=some),)
        return msgspec.structs.replace(decision, order=tuple(names), migrations=moves)


class Unsure(SchedulerWorker):
    """Has any policy, now and then one that fails."""

    chance: ClassVar[random.Random]

    def make_policy(self) -> ScalingPolicy:
        if self.chance.random() < 0.3:
            return Unsteady(self.chance.randrange(8))
        if self.chance.random() < 0.4:
            return Shuffling(self.chance)
        return load_policy(self.chance.choice(("tail", "greedy", "longest_first", "turns")))


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
    chance, devices = random.Random(seed), Devices()
    Slow.chance = Unsure.chance = chance
    Slow.held = Failing.held = devices
    Failing.seed = seed if chance.random() < 0.3 else None

    async def body() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend) as cluster:
            slots = chance.choice((2, 5, 8))
            engine = msgspec.structs.replace(ENGINE, slots=slots)
            guest = chance.random() < 0.5
            run = Run(
                cluster,
                engine=engine,
                config=LIMITS,
                rollout=Slow,
                scheduler=Unsure,
                guest=guest,
            )
            await run.start()

            async def kill() -> None:
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(chance.uniform(0.0, 20.0))
                    mortal = ["Scheduler[0]", "Rollout[0]", "Rollout[1]", *["Rollout[2]"] * guest]
                    backend.kill(chance.choice(mortal))

            killing = asyncio.create_task(kill())
            try:
                trained_once(await run.train(ITERATIONS))
            finally:
                killing.cancel()

    with registered("toy", Failing):
        run_seeded(body(), seed=seed)
    assert not devices.wrong, devices.wrong
