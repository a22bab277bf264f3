"""A ticket or a question that is given up ends the run, after the restart policy had its say."""

from __future__ import annotations

import pytest

import rlinf_async as ra
from rlinf_async.messages.embodied import Collect
from rlinf_async.runtime.jobs.checkpoints import ItemLost, abort_on_lost_items, max_deliveries

TICKET = Collect(iteration=0, steps=1, min_version=0)


@pytest.mark.parametrize(("holders", "max_restarts"), [(1, 0), (1, 3), (4, 3), (2, 50)])
def test_the_restart_policy_gives_up_before_the_channel_does(
    holders: int, max_restarts: int
) -> None:
    deaths = holders * max_restarts + 1  # the last one ends the run
    assert max_deliveries(holders, max_restarts) > deaths


async def bury(tickets: ra.Channel[Collect]) -> None:
    """Fail with the only ticket until it is given up."""
    await tickets.sender.put(TICKET)
    while not tickets.dead_letters:
        with pytest.raises(ArithmeticError):
            async with tickets.receiver.lease():
                raise ArithmeticError("the arm fell off")


async def wait_for_a_ticket(cluster: ra.Cluster, *, lost: bool) -> Collect:
    """What a run does whose ticket may have been given up: it waits for what will not come."""
    async with cluster:
        tickets = cluster.channel(Collect, name="tickets", max_deliveries=2)
        with abort_on_lost_items(cluster), tickets.sender:
            if lost:
                await bury(tickets)
            else:
                await tickets.sender.put(TICKET)
            return await tickets.receiver.get()


def test_a_ticket_that_is_given_up_ends_the_run_with_its_last_error() -> None:
    with pytest.raises(ItemLost, match="channel 'tickets': Collect was given up after 2") as raised:
        ra.run(wait_for_a_ticket(ra.Cluster.local(deadlock_after=None), lost=True))
    assert "the arm fell off" in str(raised.value)


def test_a_run_that_loses_nothing_is_left_alone() -> None:
    assert ra.run(wait_for_a_ticket(ra.Cluster.local(), lost=False)) == TICKET
