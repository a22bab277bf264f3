"""Seeded schedules over real processes, and that what judges them sees what it must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlinf_async.channels import Statistics
from tests.faults.journal import RECORDS, Did, journal
from tests.faults.plan import Fault, Plan, Role, plan
from tests.faults.roles import LOST, Closed
from tests.faults.stage import Outcome
from tests.faults.verdict import judge

COUNT = 20
Records = list[tuple[Did, int]]
PUT: Records = [(Did.PUTTING, 0), (Did.PUT, 0)]
ACKNOWLEDGED: Records = [(Did.HELD, 0), (Did.ACKNOWLEDGING, 0), (Did.ACKNOWLEDGED, 0)]
TOLD: Records = [(Did.HELD, 0), (Did.ACKNOWLEDGING, 0), (Did.NOT_ACKNOWLEDGED, 0)]


def test_every_item_is_delivered_and_acknowledged_exactly_once_or_reported() -> None:
    before = set(os.listdir("/dev/shm"))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.schedules", "--count", str(COUNT)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{COUNT} schedules in" in ran.stdout
    assert "lost: 0; doubled without a report: 0\nschedules that hung: 0; broken: 0" in ran.stdout
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "rlinf" in name}


def test_a_seed_is_always_the_same_schedule() -> None:
    assert plan(7) == plan(7)
    assert len({repr(plan(seed)) for seed in range(50)}) == 50


def test_the_schedules_have_every_kind_of_fault() -> None:
    plans = [plan(seed) for seed in range(1000)]
    kinds = {(fault.kind, fault.victim == "owner") for one in plans for fault in one.faults}
    assert kinds == {
        ("kill", False), ("kill", True), ("stop", False), ("pause", False), ("pause", True),
        ("cut", False),
    }  # fmt: skip
    assert {role.lease for one in plans for role in one.roles} == {0, 1, 3}
    assert any(one.array_bytes >= 64 * 1024 for one in plans)
    assert {one.direct for one in plans if one.array_bytes} == {False, True}


def outcome(
    *workers: tuple[Records, int], unconfirmed: int = 0, rest: int = 0, lost: int = 0
) -> Outcome:
    """What one item's schedule left, each worker with its records and how it ended."""
    role = Role("worker", "sender", 0, 1)
    made = Outcome(Plan(0, 1, 0, False, (role,), ()))
    for page, (records, status) in zip(journal(len(workers)), workers, strict=True):
        for did, item in records:
            page.write(did, item)
        made.pages.append((role, page, status))
    counts = dict.fromkeys(Statistics.__struct_fields__, 0) | {
        "unconfirmed": unconfirmed,
        "lost": lost,
    }
    statistics = Statistics(**counts | {"name": "items"})  # type: ignore[arg-type]
    made.closed = Closed(statistics, [0] * rest, [], [])
    return made


@pytest.mark.parametrize(
    ("found", "count"),
    [
        (outcome((PUT, 0), ([(Did.GOT, 0)], 0)), "once"),
        (outcome((PUT, 0), (ACKNOWLEDGED, 0)), "once"),
        (outcome((PUT, 0), rest=1), "once"),
        (outcome((PUT, -9), lost=1), "with_their_producer"),
        (outcome((PUT, 0), (ACKNOWLEDGED[:2], -9)), "once"),
        (outcome(([(Did.PUTTING, 0), (Did.TOLD, 0)], LOST)), "told"),
        (outcome(([(Did.PUTTING, 0)], -9)), "died_putting"),
        (outcome((PUT, 0), (TOLD, LOST)), "holder_told"),
        (outcome((PUT, 0), ([(Did.GOT, 0)], -9), ([(Did.GOT, 0)], 0), unconfirmed=1), "again"),
    ],
    ids=[
        "got", "acknowledged", "drained", "kept", "died acknowledging", "told", "died", "holder",
        "again",
    ],
)  # fmt: skip
def test_what_is_reported_is_not_broken(found: Outcome, count: str) -> None:
    verdict = judge(found)
    assert verdict.broken == []
    assert getattr(verdict, count) == 1


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (outcome((PUT, 0)), "item 0 was put, and nobody got it"),
        (outcome((PUT, 0), ([(Did.HELD, 0)], -9)), "nobody got it"),
        (outcome((PUT, 0), (ACKNOWLEDGED, 0), (ACKNOWLEDGED, 0)), "was acknowledged 2 times"),
        (outcome((PUT, 0), (ACKNOWLEDGED, 0), rest=1), "was acknowledged 2 times"),
        (outcome((PUT, 0), ([(Did.GOT, 0)], 0), ([(Did.GOT, 0)], 0)), "the owner reports 0"),
        (outcome((PUT, 0), ([(Did.GOT, 0)], 1)), "worker ended with status 1"),
    ],
    ids=["lost", "held and lost", "acknowledged twice", "left", "got twice", "crashed"],
)
def test_what_is_not_reported_is_broken(found: Outcome, said: str) -> None:
    assert said in judge(found).broken[0]


def test_an_owner_that_ends_without_being_killed_is_broken() -> None:
    found = outcome((PUT, 0), ([(Did.GOT, 0)], 0))
    found.closed = None
    assert judge(found).broken == ["the owner ended by itself"]
    found.faults = [Fault(0, 0.0, "kill", "owner")]
    assert judge(found).broken == []


def test_a_page_that_is_full_says_so() -> None:
    [page] = journal(1)
    for item in range(RECORDS):
        page.write(Did.GOT, item)
    with pytest.raises(RuntimeError, match="did more than"):
        page.write(Did.GOT, 0)
