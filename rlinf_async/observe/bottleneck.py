"""The bottleneck of a run, by name, from its records of waits; what more workers would gain.

::

    records --> sums by role --> a `Pipeline` --played forward--> seconds an iteration
                     |               |  each role faster, with more workers, with more staleness
                     v               v
                who waits        the role that limits, advice, gain

The role that limits is the one whose doubled speed would shorten an iteration most. Where what is
played forward does not take the time that was measured, no gain is predicted, and the role that was
busiest is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from rlinf_async.observe.trace import Fit, Work
from rlinf_async.observe.waits import PartyWork, WaitsRecord, read_waits
from rlinf_async.observe.what_if import Crew, Pipeline, iteration_seconds

EXPLAINED: Final = (0.75, 1.3)
"""played over measured seconds between which a gain is predicted"""
WORTH: Final = 0.05
"""share of an iteration that advice has to save"""
NEARLY: Final = 0.8
"""share of what a role can give at most, from which on fewer workers are enough"""
CLEARLY: Final = 1.2
"""times the gain of more workers from which on more staleness is advised instead"""
MORE: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST: Final = 4
"""a role is advised at most so many times its workers"""
FULL_CORES: Final = 0.9
"""share of busy cores from which on more processes do not help"""
RECENT: Final = 20
"""iterations that are looked at where none are chosen: the last ones"""
ACTS: Final = ("actor", "critic", "replay")
"""roles that learn; the others collect"""


class RoleWaits(msgspec.Struct, kw_only=True):
    """How the workers of a role spent their time."""

    role: str
    workers: int
    busy: float
    """share of their time in which they worked, 0 to 1"""
    waits_for: str = ""
    """role, or ``staleness``, for which they waited longest"""
    full: float = 0.0
    """share of the time in which they had as much to do as they can do at a time"""
    gain: float | None = None
    """share of an iteration that would be saved if they were twice as fast"""


class Advice(msgspec.Struct, kw_only=True):
    """What to change, and what it gains."""

    role: str = ""
    more: int = 0
    """workers of the role to add, at most"""
    max_staleness: int | None = None
    seconds_now: float
    """seconds of an iteration as it is"""
    seconds_then: float
    """seconds of an iteration, predicted"""

    @property
    def factor(self) -> float:
        """How many times as fast the run becomes."""
        return self.seconds_now / self.seconds_then

    def __str__(self) -> str:
        if self.max_staleness is not None:
            return f"max_staleness {self.max_staleness}"
        return f"{self.more} more {self.role} worker{'s' if self.more > 1 else ''}"


class Bottleneck(msgspec.Struct, kw_only=True):
    """The role that limits a run."""

    text: str
    """all of it in one sentence"""
    role: str
    iterations: tuple[int, int]
    """first and last iteration that was looked at"""
    seconds: float
    """mean seconds of an iteration, evaluations and checkpoints left out"""
    waiter: str
    """role that waits for it most"""
    share: float
    """share of the waiter's time in which it waits"""
    advice: Advice | None = None
    """None: nothing gains enough, or the gain cannot be told"""
    other: Advice | None = None
    """other advice, where it gains as much"""
    played: float | None = None
    """seconds of an iteration as it is played forward; None: this kind of run is not"""
    limits: str = ""
    """why no gain is predicted, or why more workers would not help"""
    roles: list[RoleWaits] = []

    @property
    def explained(self) -> bool:
        """Whether what is played forward takes the time that was measured."""
        return self.played is not None and _fits(self.played, self.seconds)


def analyse(
    run: Path | Sequence[WaitsRecord], *, iterations: tuple[int | None, int | None] | None = None
) -> Bottleneck:
    """Name the bottleneck of a run.

    Args:
        run: the run's folder, or records of its waits.
        iterations: the first and the last to look at, from 0 on; when left out the last 20, the
            first ones, in which the run fills up, left out.

    Raises:
        RunFolderError: as `read_waits`.
    """
    first, last = iterations or (None, None)
    records = read_waits(run, first=first, last=last) if isinstance(run, Path) else list(run)
    if iterations is None:
        records = _settled(records)
    return _Analysis(records).bottleneck()


def _settled(records: list[WaitsRecord]) -> list[WaitsRecord]:
    end = records[-1].iteration
    recent = [one for one in records if one.iteration > end - RECENT]
    filled = [one for one in recent if one.iteration - one.iterations > one.facts.max_staleness]
    return filled or recent


def _working(workers: dict[str, list[PartyWork]]) -> dict[str, list[PartyWork]]:
    """Return those of a role that have worked."""
    names = {work.name for of in workers.values() for one in of for work in one.work if work.count}
    name = next((one for one in ("steps", "micro-batch", "requests") if one in names), "")
    return {
        worker: of
        for worker, of in workers.items()
        if any((work := one.of(name)) and work.seconds > 0.0 for one in of)
    }


def _fits(played: float, measured: float) -> bool:
    return measured > 0.0 and EXPLAINED[0] <= played / measured <= EXPLAINED[1]


class _Analysis:
    """Sums of records, and what follows from them."""

    def __init__(self, records: Sequence[WaitsRecord]) -> None:
        self.records = records
        self.facts = records[-1].facts
        self.count = sum(one.iterations for one in records)
        apart = sum(one.facts.apart_seconds for one in records)
        whole = sum(one.seconds for one in records)
        self.seconds = max(1e-9, whole - apart) / self.count
        self.parties: dict[str, dict[str, list[PartyWork]]] = {}
        """by role and worker"""
        for record in records:
            for party in record.parties:
                by_worker = self.parties.setdefault(party.role, {})
                by_worker.setdefault(party.worker, []).append(party)
        for role in list(self.parties):
            working = _working(self.parties[role])
            if working:  # others are spare: ranks of a group whose number changes
                self.parties[role] = working

    def bottleneck(self) -> Bottleneck:
        """Return what limits."""
        pipeline = self.pipeline()
        played = None if pipeline is None else iteration_seconds(pipeline)
        roles = [self._role(name) for name in self.parties if name != "scheduler"]
        if pipeline is None or not played or not _fits(played, self.seconds):
            return self._unexplained(roles, played)
        gains = {
            name: played - iteration_seconds(pipeline.changed(name, crew.faster(2.0)))
            for name, crew in pipeline.crews.items()
        }
        for one in roles:
            if one.role in gains:
                one.gain = round(gains[one.role] / played, 4)
        name = max(gains, key=lambda role: gains[role])
        limits = self._cores(name)
        advice = None if limits else self._more(pipeline, name, played)
        other = self._staler(pipeline, played)
        if other is not None and advice is not None and other.factor < 0.97 * advice.factor:
            other = None
        if other is not None and advice is not None and other.factor > CLEARLY * advice.factor:
            advice, other = other, advice
        return self._said(name, roles, played, advice, other, limits)

    # ---- what is known of the workers

    def work(self, role: str, name: str) -> Work:
        """Return the work of this name of all workers of a role."""
        found = Work(name)
        for party in (one for of in self.parties.get(role, {}).values() for one in of):
            one = party.of(name)
            if one is None:
                continue
            found.seconds += one.seconds
            found.total += one.total
            found.full += one.full
            found.count += one.count
            found.size += one.size
            found.capacity = max(found.capacity, one.capacity)
            if one.fit is not None:
                found.fit = (found.fit or Fit()).plus(one.fit)
        return found

    def longest(self, role: str, *names: str) -> float:
        """Return the seconds an iteration of the worker of a role that had most of these."""
        each = [
            sum(work.seconds for party in of for name in names if (work := party.of(name)))
            for of in self.parties.get(role, {}).values()
        ]
        return max(each, default=0.0) / self.count

    def workers(self, role: str) -> int:
        """Return the number of workers of a role."""
        return len(self.parties.get(role, ()))

    def _role(self, role: str) -> RoleWaits:
        every = [one for of in self.parties[role].values() for one in of]
        seconds = sum(one.seconds for one in every) or 1.0
        name = {"reward": "score", "rollout": "requests"}.get(role, "")
        return RoleWaits(
            role=role,
            workers=self.workers(role),
            busy=round(sum(one.busy * one.seconds for one in every) / seconds, 4),
            full=round(min(1.0, self.work(role, name).full / seconds), 4) if name else 0.0,
            waits_for=self._waits_for(role),
        )

    def _waits_for(self, role: str) -> str:
        """Return who a role waited for longest, on channels."""
        found: dict[str, float] = {}
        for record in self.records:
            for wait in record.waits:
                if wait.party.partition("[")[0].lower() != role:
                    continue
                for other in wait.unblockers[:1]:
                    name = other.partition(".")[0].partition("[")[0].lower()
                    found[name] = found.get(name, 0.0) + wait.seconds
        longest = max(found, key=lambda name: found[name], default="")
        if longest != "main":
            return longest
        held = sum(one.facts.held_seconds for one in self.records)
        if role not in ACTS and held > 0.1 * sum(one.seconds for one in self.records):
            return "staleness"
        return "the run" if role not in ACTS else "samples"

    # ---- the model

    def pipeline(self) -> Pipeline | None:
        """Return the job as a model knows it; None where it is of another kind."""
        if self.facts.kind == "language":
            return self._language()
        if self.facts.kind == "embodied":
            return self._embodied()
        return None

    def _actor(self) -> tuple[Crew, float]:
        publish = self.longest("actor", "publish")
        alone = max(1e-9, self.longest("actor", "steps") or self.longest("actor", "") - publish)
        return Crew(workers=max(1, self.workers("actor")), alone=alone), publish

    def _language(self) -> Pipeline | None:
        requests = self.work("rollout", "requests")
        shapes = [tuple(one.facts.shapes) for one in self.records if one.facts.shapes]
        if requests.fit is None or not shapes or not self.workers("actor"):
            return None
        alone, beside = requests.fit.line()
        actor, publish = self._actor()
        crews = {
            "rollout": Crew(
                workers=self.workers("rollout"),
                capacity=requests.capacity or 64,
                alone=alone,
                beside=beside,
            ),
            "actor": actor,
        }
        score = self.work("reward", "score")
        if score.count:
            crews["reward"] = Crew(
                workers=self.workers("reward"),
                capacity=score.capacity or 1,
                alone=score.total / score.count,
            )
        inference = self.work("inference", "inference")
        if inference.fit is not None:
            alone, beside = inference.fit.line()
            crews["inference"] = Crew(
                workers=self.workers("inference"),
                capacity=inference.capacity or 32,
                alone=alone,
                beside=beside,
            )
        episodes = self.work("episode", "episodes")
        if episodes.count:
            crews["episode"] = Crew(
                workers=self.workers("episode"), capacity=episodes.capacity or 10**6, alone=1.0
            )
        load = self.work("rollout", "load weights")
        return Pipeline(
            samples=self.facts.samples,
            group_size=self.facts.group_size,
            max_staleness=self.facts.max_staleness,
            units=self.facts.units,
            shapes=tuple(shapes),
            load=load.total / load.count if load.count else 0.0,
            publish=publish,
            crews=crews,
        )

    def _embodied(self) -> Pipeline | None:
        steps, resets = self.work("env", "step"), self.work("env", "reset")
        if not steps.count or not self.workers("actor"):
            return None
        actor, publish = self._actor()
        crews = {
            "env": Crew(
                workers=self.workers("env"), alone=(steps.total + resets.total) / steps.count
            ),
            "actor": actor,
        }
        forward = self.work("rollout", "forward")
        rows = 1.0
        if forward.fit is not None:
            alone, beside = forward.fit.line()
            crews["rollout"] = Crew(workers=self.workers("rollout"), alone=alone, beside=beside)
            rows = forward.size / (steps.count + self.facts.samples * self.count)
        stages = max(1, self.facts.stages)
        return Pipeline(
            embodied=True,
            samples=self.workers("env") * stages,
            max_staleness=self.facts.max_staleness,
            steps=max(1, round(steps.count / (self.count * self.workers("env") * stages))),
            stages=stages,
            rows=rows,
            publish=publish,
            crews=crews,
        )

    # ---- advice

    def _more(self, pipeline: Pipeline, role: str, played: float) -> Advice | None:
        """Return the fewest more workers that give nearly all that more of them can give."""
        crew = pipeline.crews[role]
        counts = [more for more in MORE if more <= (MOST - 1) * crew.workers]
        if role == "actor":  # shares of an iteration have to be equal
            counts = [
                more
                for more in (crew.workers, 3 * crew.workers)
                if not pipeline.samples % (crew.workers + more)
            ]
        seconds = {
            more: iteration_seconds(pipeline.changed(role, crew.more(more))) for more in counts
        }
        if not seconds:
            return None
        best = played - min(seconds.values())
        if best < WORTH * played:
            return None
        more = next(one for one in counts if played - seconds[one] >= NEARLY * best)
        return self._advice(played, seconds[more], role=role, more=more)

    def _staler(self, pipeline: Pipeline, played: float) -> Advice | None:
        """Return the advice to let one more iteration be under way, where that gains enough."""
        staler = pipeline.max_staleness + 1
        if staler > 2:
            return None
        then = iteration_seconds(msgspec.structs.replace(pipeline, max_staleness=staler))
        if played - then < WORTH * played:
            return None
        return self._advice(played, then, max_staleness=staler)

    def _advice(
        self, played: float, then: float, *, role: str = "", more: int = 0,
        max_staleness: int | None = None,
    ) -> Advice:  # fmt: skip
        """Return it in the time that was measured: what is played forward gives the ratio."""
        return Advice(
            role=role,
            more=more,
            max_staleness=max_staleness,
            seconds_now=self.seconds,
            seconds_then=self.seconds * then / played,
        )

    def _cores(self, role: str) -> str:
        """Say that this host has no cores for more processes, where that is so."""
        seen = [one.cores for one in self.records if one.cores is not None]
        parties = [one for of in self.parties.get(role, {}).values() for one in of]
        accelerated = any("cuda" in device for one in parties for device in one.devices)
        if not seen or accelerated:
            return ""
        busy = sum(one.busy for one in seen) / len(seen)
        if busy < FULL_CORES:
            return ""
        return (
            f"the {seen[-1].count} cores of this host are busy {busy:.0%} of the time, so more "
            "workers on it gain nothing: use another host, or fewer other processes here"
        )

    # ---- the sentence

    def _waiter(self, role: str, roles: Sequence[RoleWaits]) -> tuple[str, float]:
        """Return who waits for a role, and for how much of its time."""
        learns = role in ACTS
        others = [one for one in roles if one.role != role and (one.role in ACTS) != learns]
        if learns:
            others = [one for one in others if one.role in ("rollout", "env")]
        if not others:
            return "", 0.0
        longest = max(others, key=lambda one: 1.0 - one.busy)
        return longest.role, round(1.0 - longest.busy, 4)

    def _said(
        self, role: str, roles: list[RoleWaits], played: float, advice: Advice | None,
        other: Advice | None, limits: str,
    ) -> Bottleneck:  # fmt: skip
        waiter, share = self._waiter(role, roles)
        text = (
            f"{waiter} waits for {role} {share:.0%} of the time"
            if waiter and share > WORTH
            else f"{role} limits the run"
        )
        chosen = advice or (None if limits else other)
        if limits:
            text += f": {limits}"
        elif chosen is None:
            text += ": no more workers of one role gain 5 % or more"
        else:
            most = "" if chosen.max_staleness is not None else ", at most,"
            takes = "take" if chosen.more > 1 else "takes"
            text += (
                f": {chosen}{most} {takes} an iteration from {chosen.seconds_now:.3g} s to "
                f"{chosen.seconds_then:.3g} s ({chosen.factor:.2f} x)"
            )
            if other is not None and other is not chosen:
                text += f"; {other} gives {other.factor:.2f} x"
        return Bottleneck(
            text=text,
            role=role,
            iterations=self._range(),
            seconds=self.seconds,
            waiter=waiter,
            share=share,
            advice=chosen,
            other=other if other is not chosen else None,
            played=played,
            limits=limits,
            roles=roles,
        )

    def _unexplained(self, roles: list[RoleWaits], played: float | None) -> Bottleneck:
        busiest = max(roles, key=lambda one: (one.busy, one.full), default=None)
        name = "" if busiest is None else busiest.role
        waiter, share = self._waiter(name, roles)
        why = "nothing is known of how work of this kind is shared out, so no gain is predicted"
        if played is not None:
            why = (
                f"no gain is predicted, as the measured work explains {played:.3g} s of an "
                f"iteration and it takes {self.seconds:.3g} s"
            )
        busy = 0.0 if busiest is None else busiest.busy
        text = f"{name or 'nobody'} is busiest, {busy:.0%} of the time"
        if waiter and share > WORTH:
            text += f", and {waiter} waits {share:.0%}"
        return Bottleneck(
            text=f"{text}; {why}",
            role=name,
            iterations=self._range(),
            seconds=self.seconds,
            waiter=waiter,
            share=share,
            played=played,
            limits=why,
            roles=roles,
        )

    def _range(self) -> tuple[int, int]:
        first = self.records[0]
        return first.iteration - first.iterations, self.records[-1].iteration - 1
