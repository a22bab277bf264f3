"""Whether every item was delivered and acknowledged exactly once, or reported.

What counts as a report:

* to its producer, that a put failed: the item may be in the channel or not, but not twice;
* to whoever held a lease, `LeaseLost`: its items go to another, or it cannot be known;
* by ``statistics().unconfirmed``, how many items of plain gets went back because the process they
  were sent to was lost, and may be seen twice;
* by ``statistics().lost``, how many items died with the producer that still kept their arrays;
* `ConnectionLost` at every end, when the owner died, and the queue with it.
"""

from __future__ import annotations

import signal
from collections import Counter

import msgspec

from tests.faults.journal import Did
from tests.faults.plan import OWNER
from tests.faults.roles import LOST
from tests.faults.stage import Outcome


class Verdict(msgspec.Struct):
    """The counts of one or of many schedules, and what was broken."""

    schedules: int = 0
    faults: dict[str, int] = {}
    items: int = 0
    put: int = 0
    """items whose put returned"""
    told: int = 0
    """items whose put raised: their producer was told that it does not know"""
    died_putting: int = 0
    once: int = 0
    """items that were delivered, and acknowledged where there is a lease, exactly once"""
    again: int = 0
    """items of plain gets that were seen twice: the owner reports as many as unconfirmed"""
    holder_told: int = 0
    """items that nobody else got, and whose holder was told that it cannot know: `LeaseLost`"""
    with_the_owner: int = 0
    """items that died with the owner of the channel: everybody was told"""
    with_their_producer: int = 0
    """items that died with their producer, which kept their arrays: the owner counts as many"""
    lost: int = 0
    doubled: int = 0
    hung: int = 0
    broken: list[str] = []

    def add(self, other: Verdict) -> None:
        """Sum up."""
        self.faults = dict(Counter(self.faults) + Counter(other.faults))
        self.broken = self.broken + other.broken
        for name in self.__struct_fields__:
            if name not in ("faults", "broken"):
                setattr(self, name, getattr(self, name) + getattr(other, name))


def judge(outcome: Outcome) -> Verdict:
    """What became of every item of a schedule."""
    verdict = Verdict(schedules=1, items=outcome.plan.items)
    verdict.faults = dict(Counter(_named(fault.kind, fault.victim) for fault in outcome.faults))
    if outcome.hung:
        verdict.hung = 1
        verdict.broken.append(outcome.hung)
        return verdict
    _check_endings(outcome, verdict)
    seen = _Seen(outcome)
    for item in range(outcome.plan.items):
        _check_item(item, seen, outcome, verdict)
    # An owner that was killed took its count along: who used its channel was told of its death.
    unconfirmed = outcome.closed.statistics.unconfirmed if outcome.closed else seen.doubly_got
    if seen.doubly_got > unconfirmed:
        verdict.doubled += seen.doubly_got - unconfirmed
        verdict.broken.append(
            f"{seen.doubly_got} plain gets saw an item again, the owner reports {unconfirmed}"
        )
    return verdict


def _named(kind: str, victim: str) -> str:
    return f"{kind} of the owner" if victim == OWNER else kind


class _Seen:
    """The journals, by item."""

    def __init__(self, outcome: Outcome) -> None:
        self.did: Counter[tuple[Did, int]] = Counter()
        self.dying: Counter[int] = Counter()
        """acknowledgements that a process was about to send, or had sent, when it was killed"""
        for _, page, status in outcome.pages:
            records = [*page.read()]
            for record in records:
                self.did[record.did, record.item] += 1
            if status < 0:
                settled = {r.item for r in records if r.did == Did.ACKNOWLEDGED}
                asked = {r.item for r in records if r.did == Did.ACKNOWLEDGING}
                self.dying.update(asked - settled)
        closed = outcome.closed
        self.rest = Counter([*closed.drained, *closed.dead]) if closed else Counter[int]()
        self.doubly_got = 0
        self.counted_lost = closed.statistics.lost if closed else 0


def _check_endings(outcome: Outcome, verdict: Verdict) -> None:
    owner_died = outcome.closed is None
    if owner_died and not any(
        fault.victim == OWNER and fault.kind == "kill" for fault in outcome.faults
    ):
        verdict.broken.append("the owner ended by itself")
    for role, _, status in outcome.pages:
        if status not in (0, LOST, -signal.SIGKILL):
            verdict.broken.append(f"{role.name} ended with status {status}")


def _check_item(item: int, seen: _Seen, outcome: Outcome, verdict: Verdict) -> None:
    did = seen.did
    put, told = did[Did.PUT, item], did[Did.TOLD, item]
    verdict.put += put
    verdict.told += told
    verdict.died_putting += did[Did.PUTTING, item] - put - told
    settled = did[Did.ACKNOWLEDGED, item] + seen.rest[item]
    seen_by = did[Did.GOT, item] + settled
    if settled > 1:
        verdict.doubled += 1
        verdict.broken.append(f"item {item} was acknowledged {settled} times")
    elif seen_by > 1:  # by plain gets: the owner says how many
        verdict.again += 1
        seen.doubly_got += seen_by - 1
    elif seen_by == 1 or (put and seen.dying[item]):  # or the owner has its acknowledgement
        verdict.once += 1
    elif put and did[Did.NOT_ACKNOWLEDGED, item]:
        verdict.holder_told += 1
    elif put and outcome.closed is None:
        verdict.with_the_owner += 1
    elif put and seen.counted_lost:
        seen.counted_lost -= 1
        verdict.with_their_producer += 1
    elif put:
        verdict.lost += 1
        verdict.broken.append(f"item {item} was put, and nobody got it")
