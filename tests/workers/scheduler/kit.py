"""A small run with a scheduler over toy backends: rollout workers, actors, and this process as
source, reward and collector."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.messages.language import (
    DataShare,
    LanguageTrainReport,
    Sample,
    SampleGroup,
    Scored,
    ScoredSample,
)
from rlinf_async.runtime.jobs.language.samples import Dispatcher, to_train
from rlinf_async.runtime.jobs.language.scheduling import decide
from rlinf_async.scheduling import SchedulingConfig
from rlinf_async.workers.actor import LanguageActor, LanguageBatches
from rlinf_async.workers.scheduler import (
    Orders,
    ScheduledActor,
    ScheduledRollout,
    SchedulerReport,
    SchedulerSummary,
    SchedulerWorker,
    Topology,
    Verdict,
    first_orders,
)
from tests.backends.requests import request
from tests.workers.rollout.language_kit import Channels, right
from tests.workers.rollout.language_kit import Rollout as KillableRollout

GROUP = 2
MINI_BATCHES = 4


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Who is launched on which devices, and how much an iteration is."""

    instances: tuple[tuple[int, ...], ...]
    """of each rollout worker"""
    actor: tuple[int, ...]
    """of each rank, the first of which trains between two iterations"""
    prompts: int

    @property
    def batches(self) -> LanguageBatches:
        """Of an iteration."""
        return LanguageBatches(
            samples=self.prompts * GROUP,
            group_size=GROUP,
            optimizer_steps=MINI_BATCHES,
            micro_batch_size=2,
        )


SMALL = Site(instances=((1,), (2,)), actor=(0, 2), prompts=8)
WIDE = Site(instances=((1,), (2,), (3,), (4,)), actor=(0, 2, 3, 4), prompts=16)
BATCHES = SMALL.batches
ENGINE = ToyEngineConfig(slots=8, seconds_per_step=1.0, mean_tokens=10, tail=1.0)
TRAINER = ToyTrainerConfig(seconds_per_token=0.0, seconds_per_step=0.0)
CONFIG = SchedulingConfig(policy="tail", answer_seconds=20.0, stop_seconds=60.0)


class Rollout(KillableRollout, ScheduledRollout):
    """Over the toy engine, as a scheduler says."""


class Ran(msgspec.Struct):
    """What came of a run."""

    samples: Counter[str] = msgspec.field(default_factory=Counter)
    """by name: how often it was trained"""
    ranks: list[int] = []
    """of each global batch"""
    reports: list[list[LanguageTrainReport]] = []
    """of each iteration, by rank"""
    summary: SchedulerSummary | None = None


class Run:
    """One run, in the loop of a test.

    Args:
        cluster: where it runs.
        site: devices and samples.
        engine: of the rollout workers.
        trainer: of the actors.
        backend: its registered name.
        config: of the scheduler.
        scheduler: its class.
        guest: another rollout worker, on the actor's own device, serves while the actor lends it.
        sizes: numbers of devices that rollout workers can serve on, beside one.
        restarts: of the scheduler, before it is given up.
    """

    def __init__(
        self,
        cluster: ra.Cluster,
        *,
        site: Site = SMALL,
        engine: ToyEngineConfig = ENGINE,
        trainer: Any = TRAINER,
        backend: str = "toy",
        config: SchedulingConfig = CONFIG,
        scheduler: type[SchedulerWorker] = SchedulerWorker,
        rollout: type[Rollout] = Rollout,
        guest: bool = False,
        sizes: tuple[int, ...] = (),
        restarts: int = 5,
    ) -> None:
        self.cluster, self.engine, self.trainer, self.config = cluster, engine, trainer, config
        self._backend = backend
        self._sizes, self._restarts = sizes, restarts
        self._site, self._guests = site, int(guest)
        self._instances = (*site.instances, *[site.actor[:1]] * guest)
        self._scheduler_class, self._rollout_class = scheduler, rollout
        self.channels = Channels(cluster)
        self.groups = cluster.channel(SampleGroup, name="groups", capacity=64)
        self.orders = cluster.latest(Orders, name="orders")
        self.verdicts = cluster.channel(Verdict, name="verdicts")
        self.reports: Any = cluster.channel(SchedulerReport, name="reports", capacity=256)
        self.shares = cluster.channel(DataShare, name="shares", capacity=8)
        self.ran = Ran()

    async def start(self) -> None:
        """Launch everybody, and have all follow the scheduler."""
        cluster, channels = self.cluster, self.channels
        self.actors = await cluster.launch(
            ScheduledActor,
            self.trainer,
            self._site.batches,
            backend=self._backend,
            count=len(self._site.actor),
            name="Actor",
            collective=None if self._backend == "toy" else "gloo",
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        [valid, *_] = await self.actors.call(LanguageActor.init_trainer_resharding, 1)
        assert valid == [dp for dp in (1, 2, 4) if dp <= len(self._site.actor)]
        home = (await self.actors.call(LanguageActor.strategy))[0]
        self.rollouts = await cluster.launch(
            self._rollout_class,
            self.engine,
            guests=self._guests,
            count=len(self._instances),
            name="Rollout",
            restart=ra.Restart(max=3),
        )
        topology = Topology(
            instances=self._instances,
            actor=self._site.actor,
            home=home,
            strategies=tuple(msgspec.structs.replace(home, dp=dp) for dp in valid),
            samples=self._site.batches.samples,
            sizes=self._sizes,
        )
        self.schedulers = await cluster.launch(
            self._scheduler_class,
            topology,
            self.config,
            name="Scheduler",
            restart=ra.Restart(max=self._restarts),
        )
        await self.orders.sender.publish(first_orders(topology))
        self._ends = [
            channels.requests.receiver.open(),
            channels.samples.sender.open(),
            channels.taken.sender.open(),
            self.groups.receiver.open(),
            self.reports.receiver.open(),  # a scheduler that dies is not the last to read them
        ]
        ends = self.orders.receiver, self.reports.sender
        self.serving = channels.serve(
            self.rollouts,
            range(len(self._instances)),
            *ends,
            method=Rollout.serve_scheduled,
        )
        self.following = self.actors.call(
            ScheduledActor.follow_scheduler,
            self.orders.receiver,
            self.reports.sender,
            self.verdicts.sender,
            self.verdicts.receiver,
            self.shares.sender,
            self.config.patience,
        )
        self.deciding = asyncio.create_task(
            decide(
                self.schedulers,
                topology,
                self.config,
                self.orders,
                self.reports.receiver,
                self.channels.requests.receiver,
            )
        )

    async def train(
        self,
        iterations: int,
        each: Callable[[SampleGroup], None] = lambda group: None,
        *,
        in_order: bool = False,
    ) -> Ran:
        """Generate and train so many iterations, on-policy; then end everybody.

        Args:
            iterations: how many.
            each: is told of every group that is to be trained.
            in_order: in the order of the groups' numbers.
        """
        dispatcher = Dispatcher(
            self.groups.sender,
            self.shares.receiver,
            batch=self._site.prompts // MINI_BATCHES,
            first=0 if in_order else None,
        )
        dispatching = asyncio.create_task(dispatcher.run())
        collecting = asyncio.create_task(self._collect(dispatcher, each))
        await self.actors.call(LanguageActor.sync_model_to_rollout, self.channels.weights.sender)
        for iteration in range(iterations):
            await self.channels.ask(*self._requests(iteration))
            reports = await self.actors.call(
                LanguageActor.run_training_pipeline, self.groups.receiver
            )
            self.ran.reports.append(reports)
            await self.actors.call(
                LanguageActor.sync_model_to_rollout, self.channels.weights.sender
            )
        await self._end()
        await dispatching
        collecting.cancel()
        return self.ran

    async def _end(self) -> None:
        self.orders.sender.close()
        self.verdicts.sender.close()
        await self.following
        self.channels.requests.close()
        self.channels.weights.sender.close()
        await self.serving
        self.ran.summary = await self.deciding
        for end in self._ends:
            end.close()

    def _requests(self, iteration: int) -> list[Any]:
        return [
            msgspec.structs.replace(
                request(number, max_tokens=64, min_version=iteration),
                group=iteration * self._site.prompts + number // GROUP,
                index=number % GROUP,
                group_size=GROUP,
                iteration=iteration,
                seed=iteration * 1000 + number,
            )
            for number in range(self._site.prompts * GROUP)
        ]

    async def _collect(self, dispatcher: Dispatcher, each: Callable[[SampleGroup], None]) -> None:
        whole: dict[int, dict[int, Sample]] = {}
        async for sample in self.channels.samples.receiver:
            right(sample, self.engine)
            asked = sample.request
            self.ran.samples[asked.name] += 1
            group = whole.setdefault(asked.group, {})
            if asked.index in group:
                continue  # a worker died after it had sent it
            group[asked.index] = sample
            if len(group) == GROUP:
                scored = [
                    ScoredSample(sample=group[at], outcome=Scored(reward=float(at)))
                    for at in range(GROUP)
                ]
                made = to_train(scored)
                each(made)
                dispatcher.add(made)
