"""Faults in virtual time: a rollout worker or the scheduler dies, an instance does not answer, a
policy fails, a strategy cannot be applied. In all of them every sample is trained once."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.backends.toy.engine import ToyEngine
from rlinf_async.backends.toy.trainer import ToyTrainer
from rlinf_async.channels import LatestReceiver, Receiver, Sender
from rlinf_async.messages.language import Request, RolloutProgress
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ClusterState,
    Migration,
    Resume,
    ScalingDecision,
    ScalingPolicy,
    SchedulingConfig,
    load_policy,
)
from rlinf_async.testing import explore
from rlinf_async.workers.scheduler import (
    DevicesReport,
    Orders,
    SchedulerReport,
    SchedulerWorker,
)
from tests.runtime.mortal import MortalBackend
from tests.workers.scheduler.explore import Devices, Failing, trained_once, try_seed
from tests.workers.scheduler.kit import ENGINE, TRAINER, Rollout, Run
from tests.workers.scheduler.registered import registered

ITERATIONS = 3


class Deaf(Rollout):
    """Rank 1 hears its first orders, and never answers."""

    async def follow(
        self,
        requests: Receiver[Request],
        orders: LatestReceiver[Orders],
        reports: Sender[SchedulerReport],
    ) -> None:
        if self.rank == 0:
            await super().follow(requests, orders, reports)
        else:
            async for _ in orders:
                self._taking.open()


class Stubborn(Rollout):
    """Rank 1 reports, but does not stop."""

    async def stop(self, hand_back: bool = False) -> None:
        if self.rank == 0:
            await super().stop(hand_back)
        else:
            await asyncio.sleep(1000.0)


@pytest.mark.parametrize("rollout", [Deaf, Stubborn])
def test_an_instance_that_does_not_answer_goes_on_and_the_run_does(
    rollout: type[Rollout], caplog: pytest.LogCaptureFixture
) -> None:
    config = SchedulingConfig(policy="tail", answer_seconds=2.0, stop_seconds=5.0)

    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, rollout=rollout, config=config)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert ran.summary.changes == 0
        assert ran.summary.unanswered >= ITERATIONS
        assert all(reports[1].samples == 0 for reports in ran.reports)

    explore(body, seeds=range(3))
    assert "rollout[1] did not" in caplog.text


class Raising:
    """A policy that fails at its third boundary."""

    def __init__(self, answer: Any = None) -> None:
        self._asked, self._answer = 0, answer

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        self._asked += 1
        if self._asked < 3:
            return ScalingDecision()
        if self._answer is None:
            raise ZeroDivisionError("no idea")
        found: ScalingDecision = self._answer
        return found


class WithRaising(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Raising()


class WithNonsense(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Raising("grow!")


class WithTooMany(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Raising(ScalingDecision(actor=Strategy(dp=3)))


class WithStrangers(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Raising(ScalingDecision(stop=(7,)))


class WithHalves(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        half: Any = 2.5  # Python does not look at the type of a field
        return Raising(ScalingDecision(migrations=(Migration(source=0, target=1, count=half),)))


class WithNobodyLeft(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return StoppingAtTheEnd()


class StoppingAtTheEnd:
    """All stop at the end of an iteration, and serve from the beginning of the next on."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase == "end":
            return ScalingDecision(stop=tuple(one.number for one in state.serving))
        return ScalingDecision()


@pytest.mark.parametrize(
    ("scheduler", "fault"),
    [
        (WithRaising, "ZeroDivisionError: no idea"),
        (WithNonsense, "not a ScalingDecision"),
        (WithTooMany, "dp=3"),
        (WithStrangers, "instance 7"),
        (WithHalves, "Expected `int`, got `float` - at `$.migrations[0].count`"),
        (WithNobodyLeft, "no instance would serve after the iteration"),
    ],
)
def test_a_policy_that_fails_leaves_the_run_static_and_that_is_said(
    scheduler: type[SchedulerWorker], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, scheduler=scheduler)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert fault in ran.summary.policy_fault
        assert ran.summary.changes == 0

    explore(body, seeds=range(2))
    assert "everybody goes home and stays there" in caplog.text


def test_a_strategy_that_the_actor_cannot_apply_gives_the_device_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for the shards")

    monkeypatch.setattr(ToyTrainer, "rescale", fail)

    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster)
            monkeypatch.undo()
            await run.start()
            monkeypatch.setattr(ToyTrainer, "rescale", fail)
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert ran.summary.changes == 0
        assert ran.summary.failed == ran.summary.stopped == ITERATIONS

    explore(body, seeds=range(2))


class Silent(Rollout):
    """Does not answer for long where it has stopped as everything is generated."""

    async def progress(self) -> RolloutProgress:
        if self.orders.reason == RELEASED:
            await asyncio.sleep(3.0 * SHORT.answer_seconds)
        return await super().progress()


RELEASED = "everything is generated"
SHORT = SchedulingConfig(policy="tail", answer_seconds=2.0, stop_seconds=4.0)


class Releasing:
    """The actor waits until everything is generated; then all instances stop."""

    def __init__(self) -> None:
        self._tail = load_policy("tail")

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase == "step" and state.unfinished:
            return ScalingDecision(actor_waits=True)
        if state.phase == "step":
            stop = tuple(one.number for one in state.serving if one.answers)
            return ScalingDecision(stop=stop, reason=RELEASED)
        return self._tail.decide(state)


class WithReleasing(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Releasing()


def test_instances_that_do_not_answer_at_the_end_of_an_iteration_serve_in_the_next() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, rollout=Silent, scheduler=WithReleasing, config=SHORT)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert not ran.summary.policy_fault
        assert ran.summary.unanswered > 0

    explore(body, seeds=range(5))


class FailsWhileMerged:
    """Rollout worker 0 serves on the actor's device, too; then the policy fails."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase == "begin":
            return ScalingDecision(actor_holds=False)
        if not state.actor.holds and len(state.instances[0].devices) == 1:
            return ScalingDecision(resume=(Resume(instance=0, devices=(1, 0)),))
        raise ZeroDivisionError("no idea")


class WithFailsWhileMerged(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return FailsWhileMerged()


def test_instances_give_the_actors_devices_back_where_the_policy_fails() -> None:
    async def body() -> None:
        Failing.seed, Failing.held = None, Devices()
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, scheduler=WithFailsWhileMerged, sizes=(1, 2))
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert ran.summary.policy_fault
        assert ran.summary.lent == 1
        assert not Failing.held.lent

    with registered("toy", Failing):
        explore(body, seeds=range(3))


class Merging:
    """Rollout worker 0 serves alone, on the devices of both."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        if state.phase == "step" and all(one.devices == one.home for one in state.instances):
            return ScalingDecision(stop=(1,), resume=(Resume(instance=0, devices=(1, 2)),))
        return ScalingDecision()


class WithMerging(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Merging()


def test_one_that_loses_a_device_that_is_not_of_its_home_serves_at_home() -> None:
    async def body() -> None:
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, scheduler=WithMerging, sizes=(1, 2))
            await run.start()

            async def lose() -> None:
                await asyncio.sleep(6.0)
                with run.reports.sender.clone("who watches hosts") as watching:
                    await watching.put(DevicesReport(lost=(2,)))

            losing = asyncio.create_task(lose())
            ran = await run.train(1)
            await losing
        trained_once(ran, 1)
        assert ran.summary is not None
        assert not ran.summary.policy_fault
        assert ran.summary.stopped == 2

    explore(body, seeds=range(3))


class Fails(SchedulerWorker):
    """Fails, or dies, while the actor has lent its device."""

    killer: ClassVar[MortalBackend | None]

    def decided(self, state: ClusterState, decision: ScalingDecision) -> None:
        if state.actor.holds or state.phase != "step" or self.incarnation:
            return
        if self.killer is None:
            raise RuntimeError("a mistake of the scheduler's own")
        self.killer.kill(self.name)


@pytest.mark.parametrize("policy", ["greedy", "longest_first"])
def test_a_policy_that_predicts_goes_on_where_the_scheduler_died_while_the_actor_had_lent(
    policy: str,
) -> None:
    """Its successor does not know how fast the actor is."""

    async def body() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend) as cluster:
            run = Run(
                cluster,
                engine=msgspec.structs.replace(ENGINE, slots=2),
                trainer=msgspec.structs.replace(TRAINER, seconds_per_token=0.05),
                scheduler=Fails,
                config=msgspec.structs.replace(SHORT, policy=policy),
                guest=True,
            )
            Fails.killer = backend
            await run.start()
            ran = await run.train(6)
        trained_once(ran, 6)
        assert ran.summary is not None
        assert ran.summary.policy_fault == ""
        assert ran.summary.changes > 0

    explore(body, seeds=range(3))


class EngineThatDiesUnseen(ToyEngine):
    """Dies once while nothing runs on it."""

    died: ClassVar[bool]
    by: ClassVar[str]

    async def offload(self) -> None:
        self._maybe("offload")
        await super().offload()

    async def onload(self) -> None:
        self._maybe("onload")
        await super().onload()

    def _maybe(self, method: str) -> None:
        if self.by == method and not EngineThatDiesUnseen.died:
            EngineThatDiesUnseen.died = True
            self.die()
        self._check_alive()


class Unseen(Rollout):
    def make_engine(self) -> ToyEngine:
        return EngineThatDiesUnseen(self._engine_config)


@pytest.mark.parametrize("by", ["offload", "onload"])
def test_an_engine_that_died_while_nothing_ran_on_it_is_built_again(by: str) -> None:
    async def body() -> None:
        EngineThatDiesUnseen.by, EngineThatDiesUnseen.died = by, False
        async with ra.Cluster.local() as cluster:
            run = Run(cluster, rollout=Unseen)
            await run.start()
            trained_once(await run.train(ITERATIONS), ITERATIONS)
        assert EngineThatDiesUnseen.died

    explore(body, seeds=range(3))


@pytest.mark.parametrize("dies", [False, True])
def test_a_scheduler_that_is_given_up_leaves_everybody_at_home(dies: bool) -> None:
    async def body() -> None:
        Failing.seed, Failing.held = None, Devices()
        backend = MortalBackend()
        async with ra.Cluster(backend) as cluster:
            run = Run(
                cluster,
                scheduler=Fails,
                config=msgspec.structs.replace(SHORT, policy="turns"),
                guest=True,
                restarts=0,
            )
            Fails.killer = backend if dies else None
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        cause = "killed by a test" if dies else "a mistake of the scheduler's own"
        assert cause in ran.summary.policy_fault
        assert not Failing.held.lent

    with registered("toy", Failing):
        explore(body, seeds=range(5))


class Ending(Run):
    """A rollout worker dies once the orders have ended."""

    backend: MortalBackend

    async def _end(self) -> None:
        self.orders.sender.close()
        self.verdicts.sender.close()
        await self.following
        self.backend.kill("Rollout[1]")
        await super()._end()


def test_a_rollout_worker_that_dies_after_the_last_orders_does_not_keep_the_run_from_ending() -> (
    None
):
    async def body() -> None:
        backend = MortalBackend()
        async with ra.Cluster(backend) as cluster:
            run = Ending(cluster)
            run.backend = backend
            await run.start()
            trained_once(await run.train(1), 1)
        assert len(backend.lives["Rollout[1]"]) == 2

    explore(body, seeds=range(3))


class Watching(SchedulerWorker):
    """Notes how much of the iteration is finished, as its policy is told, and dies once."""

    told: ClassVar[list[tuple[int, int]]]
    """by which incarnation, and how much"""
    killer: ClassVar[MortalBackend]

    def decided(self, state: ClusterState, decision: ScalingDecision) -> None:
        self.told.append((self.incarnation, state.finished))
        if not self.incarnation and state.finished > state.samples / 2:
            self.killer.kill(self.name)


def test_a_scheduler_that_is_started_again_knows_what_is_finished() -> None:
    async def body() -> None:
        backend, Watching.told = MortalBackend(), []
        async with ra.Cluster(backend) as cluster:
            config = SchedulingConfig(policy="static", every=0.1)
            run = Run(cluster, scheduler=Watching, config=config)
            Watching.killer = backend
            await run.start()
            trained_once(await run.train(1), 1)
        first = [finished for incarnation, finished in Watching.told if not incarnation]
        second = [finished for incarnation, finished in Watching.told if incarnation]
        assert 0 < max(first) <= min(second)

    explore(body, seeds=range(5))


@pytest.mark.parametrize("part", range(2))
def test_runs_with_random_faults_train_every_sample_once(part: int) -> None:
    """More of them: ``python -m tests.workers.scheduler``."""
    for seed in range(part * 25, part * 25 + 25):
        try_seed(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(91993, id="a rank without collectives falls behind rank 0"),
        pytest.param(99688, id="a rank without collectives falls behind rank 0, again"),
        pytest.param(94984, id="the last instance that serves stops answering"),
    ],
)
def test_runs_that_went_wrong_once(seed: int) -> None:
    try_seed(seed)
