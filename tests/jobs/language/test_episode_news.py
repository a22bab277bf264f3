"""What a scheduler is told of episodes that are finished."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.language import Boundary, Generated, Sample
from rlinf_async.runtime.jobs.language.scheduling import SampleNews
from rlinf_async.testing import run, wait_all_blocked
from rlinf_async.workers.scheduler import Orders, SamplesTold, SchedulerReport
from tests.backends.requests import request


def episode(group: int, iteration: int) -> Sample:
    """An episode of five tokens, of which the model drew three."""
    generated = Generated(
        token_ids=np.arange(5, dtype=np.int32),
        log_prob=np.zeros(5, np.float32),
        version=np.zeros(5, np.int32),
        finish="stop",
        drawn=np.array([True, False, True, False, True]),
    )
    return Sample(
        request=msgspec.structs.replace(request(0), group=group, iteration=iteration),
        generated=generated,
        text="",
        rollout_rank=0,
    )


def test_a_scheduler_that_is_started_again_is_told_of_all_that_are_not_trained() -> None:
    async def main() -> None:
        orders = Latest(Orders, name="orders")
        reports = Channel[SchedulerReport](SchedulerReport, name="reports")
        news = SampleNews(orders.receiver, reports.sender)
        running = asyncio.create_task(news.run())

        async def told() -> list[tuple[int, int, int]]:
            await wait_all_blocked()
            found = []
            while (await reports.state()).depth:
                report = await reports.receiver.get()
                assert isinstance(report, SamplesTold)
                found += [(one.group, one.iteration, one.tokens) for one in report.ended]
            return found

        await orders.sender.publish(Orders(sequence=1))
        news.ended(episode(0, 0))
        news.ended(episode(1, 0))
        assert await told() == [(0, 0, 3), (1, 0, 3)]
        news.ended(episode(2, 1))
        assert await told() == [(2, 1, 3)]
        await orders.sender.publish(Orders(sequence=2, scheduler=1))
        assert await told() == [(0, 0, 3), (1, 0, 3), (2, 1, 3)]
        trained = Boundary(1, 0)
        await orders.sender.publish(Orders(sequence=3, scheduler=1, boundary=trained))
        assert await told() == []
        await orders.sender.publish(Orders(sequence=4, scheduler=2, boundary=trained))
        assert await told() == [(2, 1, 3)]
        orders.sender.close()
        await running

    run(main())
