"""Programs that were found to fail, each as small as it is known, and their kind by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rlinf_async as ra
from rlinf_async.runtime import Cluster
from tests.channels.model.kit import holds
from tests.channels.model.processes import end_workers
from tests.channels.model.program import Kill, Op, Program, Task

ITEMS = 500


@pytest.fixture(autouse=True, scope="module")
def workers_end() -> Iterator[None]:
    """They are kept from one program to the next."""
    yield
    end_workers()


class Consumer(ra.Worker):
    """Gets one by one, quickly, and then takes batches."""

    async def run(self, numbers: ra.Receiver[int], taken: int) -> list[int]:
        found = [await numbers.get() for _ in range(taken)]
        while True:
            try:
                found += await numbers.get_batch(weight=400)
            except ra.EndOfChannel:
                return found


@pytest.mark.parametrize("taken", [71, 78, 85])
async def test_gets_one_by_one_and_then_batches(taken: int) -> None:
    async with Cluster.process(deadlock_after=5.0) as cluster:
        numbers = cluster.channel(int, name="numbers", capacity=512)
        group = await cluster.launch(Consumer)
        with numbers.sender as sender:
            for number in range(ITEMS):
                await sender.put(number)
        assert await group[0].call(Consumer.run, numbers.receiver, taken) == [*range(ITEMS)]


WIRES = pytest.mark.parametrize("transport", ["unix", "tcp", "process"])


def one_by_one_and_then(*ops: Op, gets: int = 13, at: int = 0) -> Program:
    """All is put and the sender closed; then a receiver gets one by one, then does this."""
    return Program(
        (
            Task("send", (Op("put", 60), Op("put", 40, "env")), at),
            Task("take", (Op("turn", turns=200), Op("get", gets), *ops), 1),
        ),
        capacity=512,
    )


@WIRES
@pytest.mark.parametrize("gets", [5, 13, 27])
@pytest.mark.parametrize(
    "then",
    [
        Op("batch", weight=1),
        Op("batch", 9, weight=30),
        Op("lease", 4, weight=3),
        Op("lease", 3, weight=3, ending="fail"),
        Op("lease", 9, weight=30),
        Op("batch", weight=100, at_least=1),
        Op("batch", weight=30, cancel=1),
    ],
    ids=str,
)
def test_gets_one_by_one_and_then_something_else(transport: str, gets: int, then: Op) -> None:
    holds(one_by_one_and_then(then, Op("get", 5), gets=gets), transport)


@WIRES
@pytest.mark.parametrize("gets", [3, 7, 15])
@pytest.mark.parametrize(
    "then",
    [Op("batch", 40, weight=7), Op("lease", 90, weight=3), Op("lease", 90), Op("get", 300)],
    ids=lambda op: op.do,
)
def test_two_tasks_on_one_end_of_which_one_only_gets(transport: str, gets: int, then: Op) -> None:
    program = Program(
        (
            Task("send", (Op("put", 300),), 2),
            Task("take", (Op("turn", turns=300), Op("get", 300)), 1),
            Task("take", (Op("turn", turns=300), Op("get", gets), then), 1),
        ),
        capacity=512,
    )
    holds(program, transport)


@WIRES
def test_a_receiver_that_stops_taking_holds_nothing_back(transport: str) -> None:
    program = Program(
        (
            Task("send", (Op("put", 200),)),
            Task("take", (Op("get", 20), Op("turn", turns=2_000)), 1),
            Task("take", (Op("turn", turns=60), Op("get", 100)), 2),
        ),
        capacity=512,
    )
    holds(program, transport)


@WIRES
def test_leases_after_gets(transport: str) -> None:
    gets = (Op("get"), Op("get", 12), Op("lease"))
    holds(Program((Task("send", (Op("put", 14),), 1), Task("take", gets, 1))), transport)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_receiver_beside_one_that_took_items_ahead_and_a_lease(transport: str) -> None:
    program = Program(
        (
            Task("send", (Op("put", 8),), 2),
            Task("take", (Op("get", 5), Op("lease", cancel=1), Op("get", 2)), 1),
        ),
        capacity=3,
    )
    holds(program, transport)


@pytest.mark.parametrize("turns", range(8))
def test_a_get_within_lag_that_is_cancelled_leaves_the_item_in_the_channel(turns: int) -> None:
    taking = Task("take", (Op("lag", cancel=turns),), 1)
    program = Program((Task("send", (Op("put"),), 1), taking), payload="struct")
    holds(program, "unix")


def test_others_do_not_see_the_end_while_a_lease_is_handed_to_one_that_has_not_run() -> None:
    """The holder gives back what it was handed: somebody must be there to take it."""
    program = Program(
        (
            Task(
                "send",
                (Op("put", 2, "env", 2), Op("put"), Op("put_nowait", 2, "env")),
            ),
            Task("take", (Op("get"), Op("lease", key="env", weight=2, ending="fail"))),
        ),
        max_weight=3,
    )
    holds(program, "local")


@pytest.mark.parametrize("seed", range(840, 860))
def test_others_do_not_see_the_end_while_a_holder_waits_in_its_lease(seed: int) -> None:
    """It will see the end itself, and give back what it holds."""
    inside = (Op("get", key=7),)
    program = Program(
        (
            Task("send", (Op("put", key=7),)),
            Task("send", (Op("put", 8, "env"),)),
            Task("take", (Op("lease", 2, 7, ending="fail", turns=3, inside=inside),)),
        ),
        capacity=5,
        seed=seed,
    )
    holds(program, "local")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_put_does_not_wait_for_room_that_its_own_process_was_lent(transport: str) -> None:
    """Four items that weigh 1 are queued: one that weighs 4 fits into a weight of 8."""
    sends = Task("send", (Op("put", 3), Op("put", 2), Op("put", weight=4)), 1)
    program = Program(
        (sends, Task("take", (Op("lease"),), 1)), capacity=5, max_weight=8, witness=True
    )
    holds(program, transport)


@pytest.mark.parametrize("after", [14, 24, 30])
def test_what_a_killed_process_took_of_items_ahead_is_counted(after: int) -> None:
    """It had them, and others get them again: ``unconfirmed`` says how many."""
    takes = Task("take", (Op("turn", turns=200), Op("iterate", 60)), 1)
    holds(
        Program((Task("send", (Op("put", 200),)), takes), capacity=512, kills=(Kill(1, after),)),
        "process",
    )


def test_others_do_not_see_the_end_before_what_a_killed_process_had_is_back() -> None:
    """A batch that was sent to it, and that it has not confirmed, goes back when it is gone."""
    takes = Task("take", (Op("get", 3, cancel=1), Op("batch", 6, weight=2)), 1)
    for after in range(7, 15):
        program = Program((Task("send", (Op("put", 20),), 2), takes), kills=(Kill(1, after),))
        holds(program, "process")


def test_holders_that_wait_for_one_another_under_two_keys_see_the_end() -> None:
    program = Program(
        (
            Task("send", (Op("put", 3, "env"), Op("put"))),
            Task("take", (Op("batch", key="env", weight=2),)),
            Task("take", (Op("lease", key="env", turns=1, inside=(Op("lease"),)),)),
            Task("take", (Op("lease", inside=(Op("batch", key="env"),)),)),
        ),
    )
    holds(program, "local")


@WIRES
def test_items_that_were_on_their_way_when_older_ones_went_back_come_after_them(
    transport: str,
) -> None:
    taking = (Op("get", 9), Op("lease", cancel=1), Op("get", 2))
    holds(Program((Task("send", (Op("put", 14),), 1), Task("take", taking, 1))), transport)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_item_that_a_cancelled_get_returns_comes_before_what_another_task_was_sent(
    transport: str,
) -> None:
    one = (Op("iterate", key="env"), Op("lease", key="env"), Op("get", key="env", cancel_after=1))
    program = Program(
        (
            Task("send", (), 1),
            Task("send", (Op("put", 9, "env"),), 1),
            Task("take", one, 2),
            Task("take", (Op("get", 7, "env"),), 2),
        ),
    )
    holds(program, transport)
