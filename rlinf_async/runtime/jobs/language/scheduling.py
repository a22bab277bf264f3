"""The scheduler of a language run: its channels, its worker, and who follows it.

::

    actor rank 0, rollout --SchedulerReport--> scheduler --Orders, `Latest`--> actor, rollout
    actor rank 0 --Verdict, `Latest`--> other ranks of the actor
    actor rank 0 --DataShare--> Dispatcher --SampleGroup--> actors
    actors --SampleGroup, trained, where there are several epochs--> Dispatcher

A scheduler that dies is restarted. One that dies too often, or fails, is given up: nobody waits for
it any more, and the run goes on with the actors and the rollout workers that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from rlinf_async.channels import Channel, ChannelClosed, EndOfChannel, Latest, Receiver
from rlinf_async.messages.language import Request, SampleGroup
from rlinf_async.parallel import Strategy
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.layout import Layout
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.actor import LanguageActor
from rlinf_async.workers.errors import WorkerError
from rlinf_async.workers.rollout.language import LanguageRolloutWorker
from rlinf_async.workers.scheduler import (
    DataShare,
    InstanceReport,
    Orders,
    SchedulerReport,
    SchedulerSummary,
    SchedulerWorker,
    Topology,
    Verdict,
    first_orders,
    last_orders,
)

log = logging.getLogger(__name__)


def topology(
    layout: Layout, samples: int, group: int, home: Strategy, valid: Sequence[int]
) -> Topology:
    """Return what the scheduler has to know of a run.

    Args:
        layout: its devices.
        samples: of an iteration.
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


class Scheduling:
    """The scheduler of one run.

    Args:
        cluster: where to launch it.
        config: of the run.
        layout: its devices.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig, layout: Layout) -> None:
        self._cluster, self._layout = cluster, layout
        self._config = config
        self._orders: Latest[Orders] = cluster.latest(Orders, name="orders")
        self._verdicts: Latest[Verdict] = cluster.latest(Verdict, name="verdicts")
        self._reports: Channel[SchedulerReport] = cluster.channel(
            SchedulerReport, name="scheduler reports", capacity=64 * (config.rollout_ranks + 1)
        )
        self.shares: Channel[DataShare] = cluster.channel(DataShare, name="shares", capacity=8)
        batches = config.actor.global_batches * config.actor.epochs
        self.again: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="samples of the next epoch", capacity=batches * len(layout.actor)
        )
        """trained once, to be trained again, where there are several epochs"""
        self._following: list[GroupCall[list[None]]] = []
        self._deciding: asyncio.Task[SchedulerSummary | None] | None = None

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
        rollouts: WorkerGroup[LanguageRolloutWorker],
        requests: Receiver[Request],
    ) -> None:
        """Have everyone follow the scheduler, from its first orders on."""
        self._requests = requests
        self._reports.receiver.open()  # while a scheduler is started again, nobody else reads them
        await self._orders.sender.publish(first_orders(self._topology))
        self._following = [
            actors.call(
                LanguageActor.follow_scheduler,
                self._orders.receiver,
                self._reports.sender,
                self._verdicts.sender,
                self._verdicts.receiver,
                self.shares.sender,
                self._config.scheduler.patience,
                self.again.sender,
            ),
            rollouts.call(
                LanguageRolloutWorker.follow_scheduler, self._orders.receiver, self._reports.sender
            ),
        ]
        self._deciding = asyncio.create_task(self._decide(), name="scheduler")

    async def _decide(self) -> SchedulerSummary | None:
        """Run the scheduler; None where it was given up."""
        try:
            [summary] = await self._scheduler.call(
                SchedulerWorker.run,
                self._orders.sender,
                self._orders.receiver,
                self._reports.receiver,
                self._requests,
            )
        except WorkerError as failure:
            log.warning(
                "the scheduler is given up, the run goes on with the strategy that it has: %s",
                failure,
            )
            newest = await self._orders.receiver.get(newer_than=0)
            orders = last_orders(newest, self._topology)
            await self._orders.sender.publish(orders)
            if not newest.holds:
                await self._until_carried_out(orders)
            await self._orders.sender.publish(
                msgspec.structs.replace(orders, over=True, holds=True, goes_on=True)
            )
            with contextlib.suppress(EndOfChannel, ChannelClosed):
                while True:  # nobody else reads them, and who reports would wait
                    await self._reports.receiver.get()
            return None
        return summary

    async def _until_carried_out(self, orders: Orders) -> None:
        """Wait until rollout workers hold none of the devices that the actors have lent."""
        limit, left = self._config.scheduler.stop_seconds, set(range(len(orders.devices)))
        try:
            async with asyncio.timeout(limit):
                while left:
                    report = await self._reports.receiver.get()
                    if isinstance(report, InstanceReport) and report.sequence >= orders.sequence:
                        left.discard(report.instance)
        except TimeoutError:
            log.warning(
                "rollout workers %s did not answer within %g s; the actors take their devices back "
                "all the same",
                sorted(left),
                limit,
            )

    async def finish(self) -> SchedulerSummary | None:
        """End the orders, and wait for all who follow them; what the scheduler did."""
        await self._orders.sender.close()
        await self._verdicts.sender.close()
        for call in self._following:
            await call
        self._reports.receiver.close()
        summary = await self._deciding if self._deciding is not None else None
        if summary is not None:
            log.info("the scheduler: %s", msgspec.json.encode(summary).decode())
        return summary
