"""A loop looks for messages that come close together, and leaves the core to whoever wants it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from rlinf_async.channels.wire.session import busy_poll as module
from rlinf_async.channels.wire.session.busy_poll import (
    BEGIN_SECONDS,
    LATE_SECONDS,
    LOOK_SECONDS,
    REST_SECONDS,
    BusyPoll,
    busy_poll,
)

TURN = 5e-6
"""seconds of a turn in which nothing came"""


class Turns:
    """A loop by hand: its clocks, and what it would call in its next turn."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0
        self.yields = 0
        self.soon: list[Callable[[], None]] = []
        self.poll = BusyPoll(self.call_soon)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    @property
    def awake(self) -> bool:
        return bool(self.soon)

    def hear(self, after: float = TURN) -> None:
        """A message comes so many seconds later."""
        self.now += after
        self.poll.heard()

    def turn(self, *, computed: float = TURN, taken: float = 0.0) -> None:
        """One turn, of so many seconds of this thread and so many of somebody else's."""
        self.now += computed + taken
        self.computed += computed
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def sleep_of_itself(self) -> float:
        """Turns until it sleeps; the seconds that this takes."""
        start = self.now
        while self.awake:
            self.turn()
        return self.now - start

    def sched_yield(self) -> None:
        self.yields += 1


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(module, "perf_counter", lambda: turns.now)
    monkeypatch.setattr(module, "thread_time", lambda: turns.computed)
    monkeypatch.setattr(os, "sched_yield", turns.sched_yield)
    return turns


def awake(turns: Turns) -> Turns:
    """Two messages came close together, and were dealt with."""
    turns.hear(1.0)
    turns.hear(BEGIN_SECONDS / 2)
    turns.turn()
    return turns


def test_messages_that_come_seldom_let_it_sleep(turns: Turns) -> None:
    for _ in range(5):
        turns.hear(BEGIN_SECONDS)
        assert not turns.awake


def test_after_two_that_come_close_together_it_looks_for_a_third_and_then_sleeps(
    turns: Turns,
) -> None:
    turns.hear(1.0)
    assert not turns.awake
    turns.hear(BEGIN_SECONDS / 2)
    assert turns.awake
    assert LOOK_SECONDS < turns.sleep_of_itself() < LOOK_SECONDS + 2 * TURN
    assert turns.yields >= LOOK_SECONDS / TURN / 2  # the core was offered again and again


def test_it_looks_as_long_as_messages_come(turns: Turns) -> None:
    awake(turns)
    for _ in range(100):
        turns.hear(LOOK_SECONDS * 0.9)
        turns.turn()
        assert turns.awake


def test_a_look_in_vain_lets_it_rest(turns: Turns) -> None:
    awake(turns).sleep_of_itself()
    rest = turns.now + REST_SECONDS
    while turns.now + BEGIN_SECONDS / 2 < rest:
        turns.hear(BEGIN_SECONDS / 2)
        assert not turns.awake
    turns.hear(BEGIN_SECONDS / 2)
    assert turns.awake


def test_a_core_that_somebody_else_took_is_left_to_him(turns: Turns) -> None:
    awake(turns)
    turns.turn()
    turns.turn(taken=LATE_SECONDS / 2)
    assert turns.awake  # others took it for a moment
    turns.turn(taken=LATE_SECONDS * 1.1)
    assert not turns.awake
    turns.hear()
    turns.hear(BEGIN_SECONDS / 2)
    assert not turns.awake  # it rests


def test_a_turn_with_work_is_neither_late_nor_yielded(turns: Turns) -> None:
    awake(turns)
    turns.hear()
    yields = turns.yields
    turns.turn(computed=LATE_SECONDS, taken=LATE_SECONDS)  # others had the core while it worked
    assert turns.awake
    assert turns.yields == yields
    turns.turn(computed=LATE_SECONDS)  # what it computes itself is not late
    assert turns.awake


async def test_a_loop_has_one_unless_it_is_turned_off_or_the_host_has_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = busy_poll(loop)
    assert isinstance(found, BusyPoll)
    assert busy_poll(loop) is found
    monkeypatch.setenv("RLINF_ASYNC_BUSY_POLL", "0")
    assert busy_poll(loop) is None
    monkeypatch.delenv("RLINF_ASYNC_BUSY_POLL")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert busy_poll(loop) is None
