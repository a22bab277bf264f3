"""`Changes`: carries one decision out, in the order of `ScalingDecision`.

::

                     waits for                               unblocked by
    release          those that stop, or keep fewer devices  rollout workers; `stop_seconds`
    actor            the actor's new strategy, or that it    its ranks; `change_seconds`
                     has offloaded
    resume           those that come back, or become wider;  rollout workers; `stop_seconds`
                     not for one whose devices others may
                     hold: it gets them later
    migrate          a target that has taken the requests    rollout workers; `answer_seconds`

Nobody gets a device that somebody else may hold (see `Holdings`). Where somebody does not answer,
everything else stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from logging import Logger, LoggerAdapter
from typing import Any

import msgspec

from rlinf_async.scheduling import ACTOR, Migration, Resume, ScalingDecision, SchedulingConfig
from rlinf_async.workers.scheduler.control import Control
from rlinf_async.workers.scheduler.messages import (
    ActorReady,
    HandBack,
    Orders,
    Topology,
)
from rlinf_async.workers.scheduler.monitor import same_sizes

TAKEN_SECONDS = 0.02
"""seconds after which an instance is asked whether it has taken the requests that move to it"""


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
    """requests handed back that went to an instance named by the policy"""
    ordered: int = 0
    """requests that were given another place in the queue"""
    unanswered: int = 0
    """waits that ended without an answer"""
    failed: int = 0
    """strategies that the actor could not apply"""
    policy_fault: str = ""
    """why the policy is not asked any more"""


class Changes:
    """Carries decisions out, and counts what became of them.

    Args:
        control: orders to everyone, and reports.
        topology: devices on which everyone was launched.
        config: limits.
        log: the scheduler's log.
    """

    def __init__(
        self,
        control: Control,
        topology: Topology,
        config: SchedulingConfig,
        log: Logger | LoggerAdapter[Any],
    ) -> None:
        self._control, self._topology, self._config = control, topology, config
        self._log = log
        self.summary = SchedulerSummary()

    async def carry_out(self, decision: ScalingDecision, *, holds_boundary: bool) -> None:
        """Do what was decided; the actor, where it is at a boundary, gets an answer.

        Args:
            decision: decision that can be carried out.
            holds_boundary: the actor stays at its boundary, though it has its devices.
        """
        control, ready = self._control, self._control.actor
        before = control.newest
        if ready is not None:
            control.holdings.until = f"end of iteration {ready.boundary.iteration}"
        due = _merged(before.due, decision.resume, decision.stop)
        if not await self._release(decision, due):
            await self._let_actor_go_on(holds_boundary)
            return
        changed, had = True, _changed(before, control.newest)
        if control.is_open and ready is not None:
            changed = await self._change(decision, ready, due, holds_boundary)
        if not changed:
            serves = had or any(control.newest.devices)
            due = _merged(before.due, had if serves else self._homes(self._not_guests()))
        await self._give(due)
        if control.newest.takers is not None:  # nobody could come back
            await control.publish()  # all take requests again
        await self._migrate(decision)

    # -- instances ----------------------------------------------------------------------------

    async def _release(self, decision: ScalingDecision, due: Sequence[Resume]) -> bool:
        """Have instances give back the devices that they do not keep; return whether all have. If
        not, all have again what they had. ``due``: what they are to have afterwards.

        One that gets others for them goes on with these, or stops until it can have them. Those
        that become wider take none of the requests that are handed back before they are: on more
        devices a prompt is read faster.
        """
        control, loop, before = self._control, asyncio.get_running_loop(), self._control.newest
        moved = {
            one.instance: one.devices if self._can_have(one) else ()
            for one in decision.resume
            if set(before.devices_of(one.instance)).difference(one.devices)
        }
        change = dict.fromkeys(decision.stop, ()) | moved
        if not change:
            return True
        began, becoming = loop.time(), {one.instance for one in decision.resume}
        others = [n for n in range(len(before.devices)) if n not in becoming]
        takers = tuple(others) if becoming else None
        late = await self._stop(change, due, decision.reason, takers)
        if not late:
            control.rates.moves.append(loop.time() - began)
            return True
        had = {number: before.devices[number] for number in change}
        await control.publish(devices=had, due=before.due)
        await self._come_back(set(change) - late)
        return False

    async def _stop(
        self,
        change: Mapping[int, tuple[int, ...]],
        due: Sequence[Resume],
        reason: str,
        takers: tuple[int, ...] | None = None,
    ) -> set[int]:
        """Order instances to go on with the devices of ``change``, or with none; return those that
        have not."""
        control, summary = self._control, self.summary
        await control.publish(devices=change, due=due, takers=takers, reason=reason)
        late = await control.gather(change, self._config.stop_seconds, "stop")
        stopped = [one for one, kept in change.items() if not kept and one not in late]
        summary.stopped += len(stopped)
        summary.migrated += sum(control.monitor.instances[one].handed_back for one in stopped)
        return late

    async def resume(self, resumes: Sequence[Resume]) -> None:
        """Let instances serve on these devices, each as soon as nobody else may hold them.

        What was due to others before stays so, unless these get it.
        """
        await self._give(_merged(self._control.newest.due, resumes))

    async def give_due(self) -> None:
        """Let instances serve whose devices nobody else may hold any more."""
        await self._give(self._control.newest.due)

    @property
    def can_give_due(self) -> bool:
        """Whether an instance can have the devices that it is due to get."""
        return any(map(self._can_have, self._control.newest.due))

    async def _give(self, due: Sequence[Resume]) -> None:
        control = self._control
        left = [one for one in due if control.newest.devices_of(one.instance) != one.devices]
        while True:
            back: dict[int, tuple[int, ...]] = {}
            for one in left:
                if self._can_have(one):
                    back[one.instance] = one.devices
            left = [one for one in left if one.instance not in back]
            says = control.newest.due, control.newest.lost
            if back or (tuple(left), control.holdings.ledger.lost) != says:
                await control.publish(devices=back, due=left)
            if not back:
                return
            await self._come_back(back)

    def _can_have(self, one: Resume) -> bool:
        return self._control.holdings.can_have(one.instance, one.devices)

    async def _come_back(self, instances: Collection[int]) -> None:
        """Wait for instances that have devices again; for those that do not answer, nobody does."""
        awaited = set(instances) - self._control.silent
        await self._control.gather(awaited, self._config.stop_seconds, "come back")

    def _not_guests(self) -> list[int]:
        guests = self._topology.guests
        return [n for n in range(len(self._topology.instances)) if n not in guests]

    def _homes(self, instances: Collection[int]) -> list[Resume]:
        homes = self._topology.instances
        return [Resume(instance=one, devices=homes[one]) for one in instances]

    async def lose(self, devices: Collection[int]) -> None:
        """Stop the instances on devices that are lost; those serve at home whose home is not.
        Devices of the actor cannot be lost: its ranks would be, too."""
        holdings = self._control.holdings
        gone = set(devices).difference(holdings.ledger.held_by(ACTOR), holdings.ledger.lost)
        if not gone:
            return
        numbers = range(len(self._topology.instances))
        lost = [n for n in numbers if gone.intersection(holdings.of_instance(n))]
        due = _merged(self._control.newest.due, (), lost)
        await self._stop(dict.fromkeys(lost, ()), due, "devices are lost")
        for one in sorted(gone):
            holdings.lose(one)
        await self._serve_at_home(lost)

    async def find(self, devices: Collection[int]) -> None:
        """Let instances serve again whose devices are all found."""
        ledger = self._control.holdings.ledger
        found = set(devices).intersection(ledger.lost)
        if not found:
            return
        for one in sorted(found):
            ledger.found(one)
        homes = enumerate(self._topology.instances)
        await self._serve_at_home([n for n, home in homes if found.intersection(home)])

    async def _serve_at_home(self, instances: Collection[int]) -> None:
        """Let stopped instances serve at home, if no device there is lost; guests only while the
        actor lends its devices."""
        control, homes = self._control, self._topology.instances
        lost, lent = control.holdings.ledger.lost, control.actor and not control.actor.holds
        able = instances if lent else set(instances).intersection(self._not_guests())
        stopped = [one for one in sorted(able) if not control.newest.devices_of(one)]
        await self.resume(self._homes([n for n in stopped if set(homes[n]).isdisjoint(lost)]))

    # -- the actor ----------------------------------------------------------------------------

    async def ask_all_ranks(self, ready: ActorReady) -> None:
        """Ask all ranks of an actor that waits what they hold, where that is not known: one has not
        answered in time, or told it to a scheduler before this one."""
        control = self._control
        if control.holdings.knows_actor(ready) or not self._is_current(ready):
            return
        await control.order_actor(
            ready.boundary, holds=ready.holds, goes_on=False, ranks_report=True
        )
        await control.changed(self._config.answer_seconds)

    async def _let_actor_go_on(self, holds_boundary: bool) -> None:
        """Let the actor go on as it is, where it waits at a boundary and has its devices."""
        control, ready = self._control, self._control.actor
        if holds_boundary or not control.is_open or ready is None or not ready.holds:
            return
        if self._is_current(ready):
            await control.order_actor(ready.boundary)

    def _is_current(self, ready: ActorReady) -> bool:
        """Whether the actor can hold what it says; else it said so before it gave devices away,
        and is not at this boundary any more."""
        control = self._control
        ranks = ready.strategy.world_size if ready.holds else 0
        is_current = control.holdings.can_give_actor(ranks)
        control.is_open = control.is_open and is_current
        return is_current

    async def _change(
        self,
        decision: ScalingDecision,
        ready: ActorReady,
        due: Sequence[Resume],
        holds_boundary: bool,
    ) -> bool:
        """Tell the actor what to be, and wait until all its ranks are; False if they are not, as
        far as is known. ``due``: to instances then; a scheduler after this one reads it."""
        control, boundary = self._control, ready.boundary
        holds = ready.holds if decision.actor_holds is None else decision.actor_holds
        strategy = decision.actor if holds else None
        if strategy is not None and same_sizes(strategy, ready.strategy):
            strategy = None
        if strategy is None and holds == ready.holds:
            await self._let_actor_go_on(holds_boundary)
            return True
        if holds and not control.holdings.can_give_actor(control.ranks_needed(ready, strategy)):
            self._log.warning(
                "devices that the actor needs are lost, or others may hold them: it stays as it is"
            )
            await self._let_actor_go_on(holds_boundary)
            return False
        began = asyncio.get_running_loop().time()
        goes_on = holds and not holds_boundary
        await control.order_actor(
            boundary,
            strategy=strategy,
            holds=holds,
            goes_on=goes_on,
            due=due,
            reason=decision.reason,
        )
        said = await control.changed(self._config.change_seconds)
        if said is None:
            await control.order_actor(boundary)
            return False
        control.rates.changes.append(asyncio.get_running_loop().time() - began)
        self.summary.lent += not holds
        if strategy is None or all(same_sizes(one.strategy, strategy) for one in said):
            self.summary.changes += strategy is not None
            return True
        self.summary.failed += 1
        control.monitor.refused(boundary.iteration, strategy)
        self._log.warning("the actor goes on with dp=%d: %s", said[0].strategy.dp, said[0].error)
        return False

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
                moved = sum(control.monitor.instances[one].handed_back for one in sources)
                taken = await self._until_taken(names, moved, takers)
                summary.migrated += moved
                summary.targeted += 0 if target is None else taken
            await control.publish()  # all take requests again

    async def _until_taken(self, names: set[str], count: int, takers: set[int]) -> int:
        """Wait until ``takers`` have taken ``count`` of the named requests; return how many they
        have.

        They say which they take. One that took some before it knew that it should say so is asked.
        """
        control, loop = self._control, asyncio.get_running_loop()
        until, taken = loop.time() + self._config.answer_seconds, set[str]()
        while len(taken) < count and loop.time() < until:
            taken |= await control.begun(names, count - len(taken), TAKEN_SECONDS)
            if len(taken) >= count:
                break
            await control.publish(takers=control.newest.takers)
            if await control.gather(takers, self._config.answer_seconds, "report"):
                break
            reports = [control.monitor.instances[one] for one in takers]
            taken |= {request.name for one in reports for request in one.requests} & names
            if not any(one.queued for one in reports):
                break
        return len(taken)

    def _serves(self, instance: int) -> bool:
        return bool(self._control.newest.devices_of(instance))

    def _names(self, migration: Migration) -> tuple[str, ...]:
        """Return the requests that leave: those named, or those with the most tokens to come."""
        monitor = self._control.monitor
        report = monitor.instances.get(migration.source)
        here = () if report is None else report.requests
        if migration.names:
            return tuple(one.name for one in here if one.name in migration.names)
        longest = sorted(here, key=lambda one: (-monitor.responses.expected(one), one.name))
        return tuple(one.name for one in longest[: migration.count])

    def _room(self, instance: int) -> int:
        report = self._control.monitor.instances.get(instance)
        return 0 if report is None else max(report.slots - len(report.requests), 0)


def _merged(
    due: Iterable[Resume], resumes: Sequence[Resume], stopped: Collection[int] = ()
) -> list[Resume]:
    """Return what is due once these resume and those have stopped: what was before stays so, unless
    it is an instance's or a device's of theirs."""
    named = {one.instance for one in resumes}.union(stopped)
    given = {device for one in resumes for device in one.devices}
    kept = (one for one in due if one.instance not in named)
    return [*(one for one in kept if given.isdisjoint(one.devices)), *resumes]


def _changed(before: Orders, now: Orders) -> list[Resume]:
    """Return the instances that have other devices now, with those that they had."""
    return [
        Resume(instance=number, devices=devices)
        for number, devices in enumerate(before.devices)
        if devices != now.devices_of(number)
    ]


def _by_target(decision: ScalingDecision) -> dict[int | None, list[Migration]]:
    """Return the migrations of instances that go on serving, by their target."""
    found: dict[int | None, list[Migration]] = {}
    for one in decision.migrations:
        if one.source not in decision.stop:
            found.setdefault(one.target, []).append(one)
    return found
