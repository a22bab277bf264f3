"""Requests are ordered in the queue, and move between rollout workers that serve, as decided."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import msgspec

import rlinf_async as ra
from rlinf_async.messages.language import Generated, Request, Sample
from rlinf_async.scheduling import ClusterState, Migration, ScalingDecision, ScalingPolicy
from rlinf_async.testing import explore
from rlinf_async.workers.rollout.language import LanguageRolloutReport
from rlinf_async.workers.scheduler import SchedulerWorker
from rlinf_async.workers.scheduler.worker import in_order
from tests.backends.requests import request
from tests.workers.scheduler.explore import trained_once
from tests.workers.scheduler.kit import ENGINE, Rollout, Run

ITERATIONS = 2


class Noting(Rollout):
    """Notes which requests it begins, and which samples it makes."""

    begun: ClassVar[dict[int, list[Request]]]
    made: ClassVar[dict[str, int]]

    async def _generate(self, request: Request, report: LanguageRolloutReport) -> Generated | None:
        self.begun[self.rank].append(request)
        return await super()._generate(request, report)

    def _sample(self, request: Request, generated: Generated) -> Sample:
        self.made[request.name] = self.rank
        return super()._sample(request, generated)


class LastFirst:
    """Wants the requests in the queue in the opposite order."""

    orders = True

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        numbers = [one.name for one in state.queued_requests]
        return ScalingDecision(order=tuple(sorted(numbers, key=_number, reverse=True)))


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("/"))


class Ordering(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return LastFirst()


class Emptying:
    """Moves what rollout worker 0 has to rollout worker 1."""

    asked: ClassVar[set[str]]

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        names = tuple(one.name for one in state.instances[0].requests)
        if state.phase != "step" or not names:
            return ScalingDecision()
        self.asked.update(names)
        return ScalingDecision(migrations=(Migration(source=0, target=1, names=names),))


class Moving(SchedulerWorker):
    def make_policy(self) -> ScalingPolicy:
        return Emptying()


def test_requests_that_wait_are_taken_in_the_order_that_was_decided() -> None:
    async def body() -> None:
        Noting.begun, Noting.made = defaultdict(list), {}
        async with ra.Cluster.local() as cluster:
            few = msgspec.structs.replace(ENGINE, slots=2)
            run = Run(cluster, engine=few, rollout=Noting, scheduler=Ordering)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert ran.summary.ordered > 0
        for taken in Noting.begun.values():
            for iteration in range(ITERATIONS):
                numbers = [
                    one.group * 2 + one.index for one in taken if one.iteration == iteration
                ][2:]  # those before were taken before the first decision
                for at, one in enumerate(numbers):  # two are begun at a time, in any order
                    assert all(one > other for other in numbers[at + 2 :])

    explore(body, seeds=range(5))


def test_requests_of_the_next_iteration_stay_behind_those_of_this_one() -> None:
    there = [
        msgspec.structs.replace(request(number), group=number, iteration=number // 2)
        for number in range(4)
    ]
    first, second, third, fourth = (one.name for one in there)
    found = [one.name for one in in_order(there, [fourth, second, third])]
    assert found == [second, first, fourth, third]


def test_requests_go_to_the_rollout_worker_that_was_named_with_their_tokens() -> None:
    async def body() -> None:
        Noting.begun, Noting.made, Emptying.asked = defaultdict(list), {}, set()
        async with ra.Cluster.local() as cluster:
            roomy = msgspec.structs.replace(ENGINE, slots=16, mean_tokens=40)
            run = Run(cluster, engine=roomy, rollout=Noting, scheduler=Moving)
            await run.start()
            ran = await run.train(ITERATIONS)
        trained_once(ran, ITERATIONS)
        assert ran.summary is not None
        assert ran.summary.targeted > 0
        there = [name for name in Emptying.asked if Noting.made[name] == 1]
        assert len(there) >= ran.summary.targeted
        continued = [
            one for one in Noting.begun[1] if one.name in there and one.partial is not None
        ]
        assert continued

    explore(body, seeds=range(5))
