"""`Changes`: carries one decision out, in the order of `ScalingDecision`.

::

                     waits for                               unblocked by
    stop             those that have to stop                 rollout workers; `stop_seconds`
    actor            the actor's new strategy, or that it    its ranks; `change_seconds`
                     has offloaded
    resume           those that come back, or become wider   rollout workers; `stop_seconds`
    migrate          a target that has taken the requests    rollout workers; `answer_seconds`

Invariant, **one holder**: a device is given to somebody only after its last holder has reported
that it released it. Where somebody does not answer, everything else stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from logging import Logger, LoggerAdapter
from typing import Any

import msgspec

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import (
    ACTOR,
    DeviceLedger,
    Migration,
    Resume,
    ScalingDecision,
    instance_name,
)
from rlinf_async.workers.scheduler.config import SchedulingConfig, Topology
from rlinf_async.workers.scheduler.control import Control
from rlinf_async.workers.scheduler.messages import ActorReady, HandBack
from rlinf_async.workers.scheduler.seen import same_sizes

LANDING_SECONDS = 0.02
"""after which an instance is asked whether it has taken what moves to it"""


class SchedulerSummary(msgspec.Struct, kw_only=True):
    """The counts of one `SchedulerWorker.run`."""

    decisions: int = 0
    """boundaries at which the policy was asked"""
    changes: int = 0
    """strategies that came into force"""
    lent: int = 0
    """times that the actor lent its devices"""
    stopped: int = 0
    """instances that released their devices"""
    migrated: int = 0
    """requests that were handed back, for that or for another instance"""
    targeted: int = 0
    """of these, those that went to an instance that the policy named"""
    ordered: int = 0
    """requests that were given another place in the queue"""
    unanswered: int = 0
    """waits that ended without an answer"""
    failed: int = 0
    """strategies that the actor could not apply"""
    policy_fault: str = ""
    """why the policy is not asked any more"""


class Changes:
    """See the module.

    Args:
        control: of everyone.
        topology: who was launched on which devices.
        config: limits.
        ledger: who holds which device.
        log: of the scheduler.
        moved: is called whenever somebody else holds a device.
    """

    def __init__(
        self,
        control: Control,
        topology: Topology,
        config: SchedulingConfig,
        ledger: DeviceLedger,
        log: Logger | LoggerAdapter[Any],
        moved: Callable[[], None],
    ) -> None:
        self._control, self._topology, self._config = control, topology, config
        self._ledger, self._log, self._moved = ledger, log, moved
        self._until = ""
        self.summary = SchedulerSummary()

    async def carry_out(self, decision: ScalingDecision, *, holds_boundary: bool) -> None:
        """Do what was decided; the actor, where it is at a boundary, gets an answer.

        Args:
            decision: that can be carried out.
            holds_boundary: the actor stays at its boundary, though it has its devices.
        """
        control, ready = self._control, self._control.actor
        self._until = "" if ready is None else f"end of iteration {ready.boundary.iteration}"
        before = control.newest.stopped
        becoming = {one.instance for one in decision.resume}
        if late := await self._stop(decision.stop, decision.reason, becoming):
            await control.publish(stopped=before)
            await self._let_go(holds_boundary)
            await self._came_back(set(decision.stop) - late)
            return
        changed: bool | None = True
        if control.is_open and ready is not None:
            changed = await self._change(decision, ready, holds_boundary)
        if changed:
            await self.resume(decision.resume)
        elif changed is False:  # it is known what the actor holds: as before
            homes = self._topology.instances
            await self.resume([Resume(instance=n, devices=homes[n]) for n in decision.stop])
        if control.newest.takers is not None:  # nothing could come back, or nobody knows
            await control.publish()  # all take requests again
        await self._migrate(decision)

    # -- instances ----------------------------------------------------------------------------

    async def _stop(
        self, instances: Collection[int], reason: str, becoming: Collection[int] = ()
    ) -> set[int]:
        """Stop instances; those that did not.

        ``becoming``: instances that get other devices then. They take none of the requests that are
        handed back before they have them: on more devices a prompt is read faster.
        """
        wanted, control = set(instances), self._control
        if not wanted:
            return set()
        began = asyncio.get_running_loop().time()
        await control.publish(
            stopped={*control.newest.stopped, *wanted},
            wider=tuple(one for one in control.newest.wider if one.instance not in wanted),
            takers=self._others(becoming) if becoming else None,
            reason=reason,
        )
        late = await control.gather(wanted, self._config.stop_seconds, "stop")
        if not late:
            control.rates.moved(asyncio.get_running_loop().time() - began)
        for one in wanted - late:
            self._ledger.release(instance_name(one))
            self.summary.stopped += 1
            self.summary.migrated += control.seen.instances[one].handed_back
        self._moved()
        return late

    def _others(self, instances: Collection[int]) -> tuple[int, ...]:
        return tuple(n for n in range(len(self._topology.instances)) if n not in instances)

    async def resume(self, resumes: Sequence[Resume]) -> None:
        """Let instances serve whose devices nobody else holds; those last that get devices of
        others which become narrower."""
        left = list(resumes)
        while back := {one.instance: one for one in left if self._can_have(one)}:
            left = [one for one in left if one.instance not in back]
            if not await self._resume(back):
                return

    async def _resume(self, back: dict[int, Resume]) -> bool:
        """Give instances their devices; whether they all use them."""
        control = self._control
        wider = [one for one in control.newest.wider if one.instance not in back]
        for number, one in back.items():  # it may have them now, whether it answers or not
            home = self._topology.instances[number]
            self._take(number, one.devices)
            if len(one.devices) != len(home):
                wider.append(one)
        self._moved()
        await control.publish(stopped=set(control.newest.stopped) - set(back), wider=tuple(wider))
        return not await control.gather(set(back), self._config.stop_seconds, "come back")

    def _can_have(self, one: Resume) -> bool:
        own = set(self._ledger.held_by(instance_name(one.instance)))
        return own.union(self._ledger.free).issuperset(one.devices)

    def _take(self, number: int, devices: Sequence[int]) -> None:
        name, topology = instance_name(number), self._topology
        own = set(topology.actor[: topology.home.world_size])
        self._ledger.release(name)
        self._ledger.take(name, [one for one in devices if one not in own])
        if borrowed := [one for one in devices if one in own]:
            self._ledger.lend(ACTOR, name, borrowed, until=self._until)

    async def _came_back(self, instances: set[int]) -> None:
        for one in instances:
            self._ledger.take(instance_name(one), self._topology.instances[one])
        self._moved()
        if instances:
            await self._control.gather(instances, self._config.stop_seconds, "come back")

    async def lose(self, devices: Collection[int]) -> set[int]:
        """Stop the instances on devices that are lost; their numbers. Devices of the actor cannot
        be lost: its ranks would be, too."""
        gone = set(devices) - set(self._ledger.held_by(ACTOR))
        numbers = range(len(self._topology.instances))
        lost = {n for n in numbers if gone.intersection(self._ledger.held_by(instance_name(n)))}
        late = await self._stop(lost, "devices are lost")
        for number in late:
            self._ledger.release(instance_name(number))
        for one in sorted(gone):
            self._ledger.lose(one)
        self._moved()
        return lost

    # -- the actor ----------------------------------------------------------------------------

    async def _let_go(self, holds_boundary: bool) -> None:
        """Let the actor go on as it is, where it waits at a boundary and has its devices."""
        control = self._control
        if holds_boundary or not control.is_open or control.actor is None:
            return
        if control.actor.holds:
            await control.order_actor(control.actor.boundary)

    async def _change(
        self, decision: ScalingDecision, ready: ActorReady, holds_boundary: bool
    ) -> bool | None:
        """Tell the actor what to be, and wait until all its ranks are; False if they could not,
        None if nobody knows."""
        control, boundary = self._control, ready.boundary
        holds = ready.holds if decision.actor_holds is None else decision.actor_holds
        strategy = decision.actor if holds else None
        if strategy is not None and same_sizes(strategy, ready.strategy):
            strategy = None
        if strategy is None and holds == ready.holds:
            await self._let_go(holds_boundary)
            return True
        began = asyncio.get_running_loop().time()
        goes_on = holds and not holds_boundary
        await control.order_actor(
            boundary, strategy=strategy, holds=holds, goes_on=goes_on, reason=decision.reason
        )
        said = await control.changed()
        if said is None:
            await control.order_actor(boundary)
            return None
        control.rates.changed(asyncio.get_running_loop().time() - began)
        after = said[0].strategy
        self._hold(after if holds else None)
        self.summary.lent += not holds
        if strategy is None or all(same_sizes(one.strategy, strategy) for one in said):
            self.summary.changes += strategy is not None
            return True
        self.summary.failed += 1
        control.seen.refused(boundary.iteration, strategy)
        self._log.warning("the actor goes on with dp=%d: %s", after.dp, said[0].error)
        return False

    def _hold(self, strategy: Strategy | None) -> None:
        """The actor has the devices of this strategy, or none; those beyond its own are lent to
        it."""
        topology, ledger = self._topology, self._ledger
        ledger.release(ACTOR)
        if strategy is not None:
            own = topology.actor[: topology.home.world_size]
            holds = topology.actor[: strategy.world_size]
            ledger.take(ACTOR, [one for one in holds if one in own])
            for number, home in enumerate(topology.instances):
                if lent := [one for one in holds if one in home and one not in own]:
                    ledger.lend(instance_name(number), ACTOR, lent, until=self._until)
        self._moved()

    # -- requests -----------------------------------------------------------------------------

    async def _migrate(self, decision: ScalingDecision) -> None:
        """Move requests between instances that serve, one target after the other.

        Those that leave go back to the queue in their places, and only the target takes requests
        until it has them: whoever dies meanwhile, they are in the queue. A target that has no room
        for them, or does not take them in time, leaves them to everyone.
        """
        control, summary = self._control, self.summary
        for target, moves in _by_target(decision).items():
            leaving = [
                HandBack(instance=one.source, names=here)
                for one in moves
                if self._serves(one.source) and (here := self._names(one))
            ]
            names = {name for one in leaving for name in one.names}
            sources = {one.instance for one in leaving}
            takers = set(range(len(self._topology.instances))) - sources
            takers = {one for one in takers if self._serves(one)} & (
                takers if target is None else {target}
            )
            if not names or sum(map(self._room, takers)) < len(names):
                continue
            await control.publish(takers=tuple(sorted(takers)), hand_back=tuple(leaving))
            limit = self._config.answer_seconds
            if not await control.gather(sources, limit, "hand requests back"):
                moved = sum(control.seen.instances[one].handed_back for one in sources)
                landed = await self._land(names, moved, takers)
                summary.migrated += moved
                summary.targeted += 0 if target is None else landed
            await control.publish()  # all take requests again

    async def _land(self, names: set[str], count: int, takers: set[int]) -> int:
        """Wait until these instances have taken so many of these requests; how many they have.

        They say which they take. One that took some before it knew that it should say so is asked.
        """
        control, loop = self._control, asyncio.get_running_loop()
        until, landed = loop.time() + self._config.answer_seconds, set[str]()
        while len(landed) < count and loop.time() < until:
            landed |= await control.begun(names, count - len(landed), LANDING_SECONDS)
            if len(landed) >= count:
                break
            await control.publish(takers=control.newest.takers)
            if await control.gather(takers, self._config.answer_seconds, "report"):
                break
            seen = [control.seen.instances[one] for one in takers]
            landed |= {request.name for one in seen for request in one.requests} & names
            if not any(one.queued for one in seen):
                break
        return len(landed)

    def _serves(self, instance: int) -> bool:
        return bool(self._ledger.held_by(instance_name(instance)))

    def _names(self, migration: Migration) -> tuple[str, ...]:
        """Return the requests that leave: those named, or those with the most tokens to come."""
        seen = self._control.seen
        report = seen.instances.get(migration.source)
        here = () if report is None else report.requests
        if migration.names:
            return tuple(one.name for one in here if one.name in migration.names)
        longest = sorted(here, key=lambda one: (-seen.expected(one), one.name))
        return tuple(one.name for one in longest[: migration.count])

    def _room(self, instance: int) -> int:
        report = self._control.seen.instances.get(instance)
        return 0 if report is None else max(report.slots - len(report.requests), 0)


def _by_target(decision: ScalingDecision) -> dict[int | None, list[Migration]]:
    """Return the migrations of instances that go on serving, by their target."""
    found: dict[int | None, list[Migration]] = {}
    for one in decision.migrations:
        if one.source not in decision.stop:
            found.setdefault(one.target, []).append(one)
    return found
