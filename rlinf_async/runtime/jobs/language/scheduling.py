"""The scheduler of a language run: its channels, its worker, and who follows it.

::

    actor rank 0, rollout --SchedulerReport--> scheduler --Orders, `Latest`--> actor, rollout
    actor rank 0 --Verdict, by rank--> other ranks of the actor
    actor rank 0 --DataShare--> Dispatcher --SampleGroup--> actors
    actors --SampleGroup, trained, where there are several epochs--> Dispatcher
    Collector --finished episodes--> SampleNews --SamplesTold--> scheduler

A scheduler that dies is restarted. One that dies too often, or fails, is given up: this process
takes its place, with policy "static", by which everybody goes home and stays there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec

from rlinf_async.channels import (
    Channel,
    EndOfChannel,
    Latest,
    LatestReceiver,
    Receiver,
    Sender,
)
from rlinf_async.messages.language import DataShare, Request, Sample, SampleGroup, ScoredSample
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.calls import GroupCall, WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import start_background
from rlinf_async.runtime.jobs.language.backends import DeviceLayout
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.supervise import Restart
from rlinf_async.runtime.wakers import WorkEvent
from rlinf_async.scheduling import SchedulingConfig
from rlinf_async.workers.actor import LanguageActor
from rlinf_async.workers.base import WorkerContext, WorkerError, WorkerInfo, make, task_group
from rlinf_async.workers.rollout.language import LanguageRolloutReport, LanguageRolloutWorker
from rlinf_async.workers.scheduler import (
    EndedCount,
    EndedLog,
    Orders,
    SamplesTold,
    ScheduledActor,
    ScheduledRollout,
    SchedulerReport,
    SchedulerSummary,
    SchedulerWorker,
    Topology,
    Verdict,
    first_orders,
)

log = logging.getLogger(__name__)


def topology(
    layout: DeviceLayout, samples: int, group: int, home: Strategy, valid: Sequence[int]
) -> Topology:
    """Return what the scheduler has to know of a run.

    Args:
        layout: devices of the run.
        samples: samples of an iteration.
        group: samples of a prompt.
        home: the actor's strategy between two iterations.
        valid: data parallel sizes that fit model and mini-batch.
    """
    return Topology(
        instances=layout.instances,
        actor=layout.actor,
        home=home,
        strategies=tuple(msgspec.structs.replace(home, dp=dp) for dp in valid),
        samples=samples,
        group=group,
        hosts=layout.hosts,
    )


async def decide(
    scheduler: WorkerGroup[SchedulerWorker],
    topology: Topology,
    config: SchedulingConfig,
    orders: Latest[Orders],
    reports: Receiver[SchedulerReport],
    requests: Receiver[Request],
    tasks: Receiver[Request] | None = None,
) -> SchedulerSummary:
    """Have the scheduler decide until the orders end; in this process, where it is given up."""
    try:
        [summary] = await scheduler.call(
            SchedulerWorker.run, orders.sender, orders.receiver, reports, requests, tasks
        )
        return summary
    except WorkerError as failure:
        log.warning(
            "the scheduler is given up, everybody goes home and stays there (policy 'static'): %s",
            failure,
        )
        newest = await orders.receiver.get(newer_than=0)
        info = WorkerInfo(group="Scheduler", rank=0, world_size=1, incarnation=newest.scheduler + 1)
        config = msgspec.structs.replace(config, policy="static")
        with ThreadPoolExecutor(1) as executor:
            here = make(SchedulerWorker, WorkerContext(info, executor), (topology, config), {})
            summary = await here.run(orders.sender, orders.receiver, reports)
        summary.policy_fault = f"the scheduler was given up: {failure}"
        return summary


class SampleNews:
    """Tells the scheduler what rollout workers do not know: which episodes are finished, and which
    groups were replaced by other prompts.

    A scheduler that is started again is told of all that are not trained: what the one before had
    read is lost with it.

    Args:
        orders: the scheduler's.
        reports: to the scheduler.
    """

    def __init__(self, orders: LatestReceiver[Orders], reports: Sender[SchedulerReport]) -> None:
        self._orders, self._reports = orders, reports
        self._news = WorkEvent()
        self._ended = EndedLog()
        self._replaced = EndedLog()

    def ended(self, sample: Sample) -> None:
        """Take an episode; a second one of its name does no harm."""
        self._ended.add(_count(sample))
        self._news.set()

    def replaced(self, group: Sequence[ScoredSample]) -> None:
        """Take the samples of a group that another prompt takes the place of."""
        for one in group:
            self._replaced.add(_count(one.sample))
        self._news.set()

    async def run(self) -> None:
        """Tell the scheduler until its orders end."""
        async with task_group() as group:
            telling = group.create_task(self._tell())
            await self._follow()
            telling.cancel()

    async def _follow(self) -> None:
        seen = scheduler = 0
        while True:
            try:
                newest = await self._orders.get(newer_than=seen)
            except EndOfChannel:
                return
            seen = self._orders.version
            self._ended.forget(newest.boundary)
            self._replaced.forget(newest.boundary)
            if newest.scheduler != scheduler:
                scheduler = newest.scheduler
                self._ended.tell_again()
                self._replaced.tell_again()
                self._news.set()

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            ended, replaced = self._ended.take(), self._replaced.take()
            if ended or replaced:
                await self._reports.put(SamplesTold(ended=ended, replaced=replaced))


def _count(sample: Sample) -> EndedCount:
    request = sample.request
    return EndedCount(
        group=request.group,
        tokens=sample.generated.drawn_tokens,
        name=request.name,
        iteration=request.iteration,
    )


class Scheduling:
    """The scheduler of one run.

    Args:
        cluster: where to launch it.
        config: the run's configuration.
        layout: devices of the run.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig, layout: DeviceLayout) -> None:
        self._cluster, self._layout = cluster, layout
        self._config = config
        self._orders: Latest[Orders] = cluster.latest(Orders, name="orders")
        self._verdicts: Channel[Verdict] = cluster.channel(Verdict, name="verdicts")
        self._reports: Channel[SchedulerReport] = cluster.channel(
            SchedulerReport, name="scheduler reports", capacity=64 * (config.rollout_ranks + 1)
        )
        self.shares: Channel[DataShare] = cluster.channel(DataShare, name="shares", capacity=8)
        batches = config.actor.global_batches * config.actor.epochs
        self.again: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="samples of the next epoch", capacity=batches * len(layout.actor)
        )
        """trained once, to be trained again, where there are several epochs"""
        self.news = (
            SampleNews(self._orders.receiver, self._reports.sender)
            if config.has_episodes or config.training.accept
            else None
        )
        self._telling: asyncio.Task[None] | None = None
        self._following: GroupCall[list[None]] | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._summary: SchedulerSummary | None = None

    async def launch_rollouts(
        self, *args: Any, **options: Any
    ) -> WorkerGroup[LanguageRolloutWorker]:
        """Start the rollout workers, the last of which are guests: see `ScheduledRollout`."""
        guests = self._config.scheduler.guests
        return await self._cluster.launch(ScheduledRollout, *args, guests=guests, **options)

    def serve(
        self, rollouts: WorkerGroup[LanguageRolloutWorker], *ends: Any
    ) -> GroupCall[list[LanguageRolloutReport]]:
        """Have rollout workers serve, with these ends of channels, as the scheduler says."""
        scheduled = cast(WorkerGroup[ScheduledRollout], rollouts)  # see `launch_rollouts`
        ends = (*ends, self._orders.receiver, self._reports.sender, self._config.sticky)
        return scheduled.call(ScheduledRollout.serve_scheduled, *ends)

    async def prepare(self, actors: WorkerGroup[LanguageActor]) -> None:
        """Prepare the actors for other strategies: those beyond home become idle, and give the
        memory of their devices back."""
        config = self._config
        valid = await actors.call(
            LanguageActor.init_trainer_resharding,
            config.actors,
            timeout=config.scheduler.change_seconds,
        )
        home = (await actors.call(LanguageActor.strategy))[0]
        samples, group = config.iteration_samples, config.training.group_size
        self._topology = topology(self._layout, samples, group, home, valid[0])

    async def launch(self) -> None:
        """Start the scheduler."""
        config = self._config
        self._scheduler: WorkerGroup[SchedulerWorker] = await self._cluster.launch(
            SchedulerWorker,
            self._topology,
            config.scheduler,
            name="Scheduler",
            restart=Restart(max=config.cluster.max_restarts),
            env_vars=config.cluster.environment,
        )

    async def connect(
        self,
        actors: WorkerGroup[LanguageActor],
        requests: Receiver[Request],
        tasks: Receiver[Request],
    ) -> None:
        """Have actors follow the scheduler, from its first orders on, as rollout workers do.

        ``tasks``: of the episodes, if samples are episodes.
        """
        self._requests = requests
        self._tasks = tasks if self._config.has_episodes else None
        self._reports.receiver.open()  # while a scheduler is started again, nobody else reads them
        await self._orders.sender.publish(first_orders(self._topology))
        scheduled = cast(WorkerGroup[ScheduledActor], actors)  # a scheduler's run launches these
        self._following = scheduled.call(
            ScheduledActor.follow_scheduler,
            self._orders.receiver,
            self._reports.sender,
            self._verdicts.sender,
            self._verdicts.receiver,
            self.shares.sender,
            self._config.scheduler.patience,
            self.again.sender,
        )
        self._deciding = start_background(self._cluster, self._decide(), "scheduler")
        if self.news is not None:
            news = self.news.run()
            self._telling = start_background(self._cluster, news, "news of samples")

    async def _decide(self) -> None:
        self._summary = await decide(
            self._scheduler,
            self._topology,
            self._config.scheduler,
            self._orders,
            self._reports.receiver,
            self._requests,
            self._tasks,
        )

    async def end_orders(self) -> None:
        """End the orders, and wait for the actors that follow them."""
        self._orders.sender.close()
        self._verdicts.sender.close()
        if self._following is not None:
            await self._following
        if self._telling is not None:
            await self._telling
            self._reports.sender.close()

    async def finish(self) -> SchedulerSummary | None:
        """Once nobody reports any more: wait for the scheduler; what it did."""
        self._reports.receiver.close()
        if self._deciding is not None:
            await self._deciding
        if self._summary is not None:
            log.info("the scheduler: %s", msgspec.json.encode(self._summary).decode())
        return self._summary
