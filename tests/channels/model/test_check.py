"""The checks themselves: each finds what is planted, and nothing in a run that is sound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rlinf_async.channels import Channel, DeadLetter
from rlinf_async.channels.queue import statistics_of
from rlinf_async.testing import run as run_virtually
from rlinf_async.testing import wait_all_blocked
from tests.channels.model.check import check
from tests.channels.model.history import Event, History
from tests.channels.model.local import AtOnce, run_local
from tests.channels.model.order import out_of_order
from tests.channels.model.program import Do, Op, Program, Side, Task, as_test
from tests.channels.model.runners import kind_of, run
from tests.channels.model.shrink import shrink
from tests.channels.model.stage import Stage
from tests.channels.model.waiting import waiting_wrongly

SOUND = Program(
    (
        Task("send", (Op("put", 12, weight=2), Op("put", 2, "env"))),
        Task("take", (Op("get", 3), Op("batch", 2, weight=6), Op("statistics"), Op("get"))),
    ),
    capacity=8,
)


def events(history: History, do: str) -> list[Event]:
    """Those that were handed something, or put it."""
    return [event for event in history.events if event.do == do and event.items]


def lose(history: History) -> None:
    events(history, "get")[0].items = []


def double(history: History) -> None:
    history.dead.append(DeadLetter(events(history, "get")[0].items[0], 1, ""))


def invent(history: History) -> None:
    events(history, "get")[0].items.append(99)


def swap_gets(history: History) -> None:
    first, second = events(history, "get")[:2]
    first.items, second.items = second.items, first.items


def swap_within(history: History) -> None:
    events(history, "batch")[0].items.reverse()


def overload(history: History) -> None:
    events(history, "batch")[0].most = 5


def underload(history: History) -> None:
    event = events(history, "batch")[0]
    event.least, event.most, event.finished = 50, 50, 1


def mix_keys(history: History) -> None:
    events(history, "get")[0].key = "env"


def fill(history: History) -> None:
    history.depths.append((17, 17))


def keep(history: History) -> None:
    _count(history, leases_out=1)


def miscount(history: History) -> None:
    _count(history, gets=0, puts=0)


def hang(history: History) -> None:
    event = events(history, "get")[0]
    event.finished = 0


def fail(history: History) -> None:
    events(history, "get")[0].outcome = "KeyError"


def fail_for_nothing(history: History) -> None:
    events(history, "get")[0].outcome = "ChannelFailed"


def _count(history: History, **counts: int) -> None:
    assert history.statistics is not None
    history.statistics = msgspec.structs.replace(history.statistics, **counts)


PLANTED: dict[Callable[[History], None], str] = {
    lose: "lost: [0:0]",
    double: "delivered twice: [0:0]",
    invent: "never put, and delivered: [0:99]",
    swap_gets: "0:0 was taken by task 1 get",
    swap_within: "behind an item that was put later",
    overload: "weighs 6, more than 5",
    underload: "weighs 6, less than 50",
    mix_keys: "was given items of other keys",
    fill: "17 items were queued, where 16 fit",
    keep: "at the end the channel still has {'leases_out': 1}",
    miscount: "0 gets are counted, and 14 items were consumed",
    hang: "never finished",
    fail: "raised KeyError",
    fail_for_nothing: "nobody has failed the channel",
}


def test_a_sound_run_is_sound() -> None:
    assert check(run_local(SOUND)) == []


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Callable[[History], None]) -> None:
    history = run_local(SOUND)
    plant(history)
    assert any(PLANTED[plant] in found for found in check(history)), check(history)


def test_an_item_that_came_back_may_come_late() -> None:
    history = run_local(SOUND)
    swap_gets(history)
    first = events(history, "get")[0]
    back = Event(1, first.end, "lease", None, 1, first.begun, first.finished, "cancelled")
    history.events.append(back)
    assert check(history) == []


def test_tasks_that_wait_for_ever_are_reported_with_what_the_channel_says() -> None:
    async def main() -> str:
        stage = Stage(Program((Task("take", (Op("get"),)),)), AtOnce(), local=True)
        with stage.channel.sender.clone("nobody"), stage.channel.receiver.clone() as receiver:
            history = await stage.conduct([receiver.get()])
        return history.hung

    hung = run_virtually(main(), seed=None)
    assert "tasks wait for ever" in hung
    assert "only nobody can end this wait" in hung


def waiting(do: Do, key: str | None = None, end: Side = "take", least: int = 1) -> Event:
    """One that has begun and not ended."""
    return Event(0, (end, 0, 0), do, key, least, 1, items=[1] if do == "put" else [])


def put(number: int) -> Event:
    return Event(1, ("send", 0, 0), "put", None, 1, 1, 2, "ok", [number])


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        ([waiting("get"), put(0)], "1 takes wait for key None, where 1 items"),
        ([waiting("batch", least=2), put(0)], None),
        ([waiting("get", "env"), put(0)], None),
        ([waiting("put", end="send"), put(0)], "1 puts wait for room under key None"),
        ([waiting("put", end="send"), put(0), put(2)], None),
    ],
)
def test_whoever_waits_and_could_be_served_is_found(
    happened: list[Event], said: str | None
) -> None:
    async def main() -> list[str]:
        channel = Channel(int, name="numbers")
        found = waiting_wrongly(channel, History(Program((), capacity=2), happened))
        return [what for what in found if "the report" not in what]

    found = run_virtually(main())
    assert (said in found[0]) if said else not found


def test_a_wait_that_the_report_leaves_out_or_makes_up_is_found() -> None:
    async def main() -> tuple[list[str], list[str]]:
        channel = Channel(int, name="numbers")
        history = History(Program(()), [waiting("get")])
        left_out = waiting_wrongly(channel, history)
        getting = asyncio.create_task(channel.receiver.get())
        await wait_all_blocked()
        history.events = []
        made_up = waiting_wrongly(channel, history)
        getting.cancel()
        return left_out, made_up

    left_out, made_up = run_virtually(main())
    assert "the report leaves out ('task0', 'get', None)" in left_out
    assert "the report says that ('main', 'get', None) waits" in made_up


def test_a_failing_program_shrinks_to_what_fails_and_prints_as_a_test() -> None:
    def fails(program: Program) -> bool:
        sent = sum(op.times for task in program.tasks for op in task.ops if op.do == "put")
        return sent >= 3 and any(op.do == "lease" for task in program.tasks for op in task.ops)

    large = Program(
        (
            Task("send", (Op("put", 40, "env", 3, size=7), Op("flush")), 2, 1),
            Task("take", (Op("get", 9), Op("lease", 4, cancel=3, ending="fail")), 1),
            Task("take", (Op("batch", weight=12),)),
        ),
        capacity=3, payload="array", cuts=(3, 9),
    )  # fmt: skip
    small = shrink(large, fails)
    assert small.tasks == (
        Task("send", (Op("put", 3),), 1),
        Task("take", (Op("lease"),), 1),
    )
    text = as_test(small, "local", "it fails")
    names: dict[str, Any] = {"Program": Program, "Task": Task, "Op": Op, "run": run}
    exec(text, names)
    names["test_found"]()
    assert "# it fails" in text


def test_each_violation_has_a_kind() -> None:
    assert kind_of("lost: [0:0]") == "lost"
    assert kind_of("something new") == "other"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_payload_sends_the_items_beside_it_back(lost: int) -> None:
    """Who had them may have been handed nothing in the end, or others: they come later than those
    behind them."""
    took: list[tuple[int, list[int]]] = [(2, []), (0, [2]), (0, [1])]
    history = History(
        Program(()),
        [
            *(Event(0, ("send", 1, 0), "put", None, 1, at, at + 1, "ok", [at // 2])
              for at in range(2, 6, 2)),
            *(Event(at, ("take", at, 0), "batch", None, 1, 10 + turn * 2, 11 + turn * 2,
                    "ok" if items else "EndOfChannel", items)
              for turn, (at, items) in enumerate(took)),
        ],
        killed=[1],
    )  # fmt: skip
    statistics = statistics_of(Channel(int, name="items").queue)
    history.statistics = msgspec.structs.replace(statistics, lost=lost)
    assert bool(out_of_order(history)) == (not lost)
