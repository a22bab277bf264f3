"""Who may hold which device: by what everyone was told, and by reports that are not too old."""

from __future__ import annotations

import msgspec
import pytest

from rlinf_async.messages.language import Boundary
from rlinf_async.parallel import Strategy
from rlinf_async.scheduling import ACTOR, DeviceTaken
from rlinf_async.workers.scheduler import (
    ActorChanged,
    ActorReady,
    InstanceReport,
    Topology,
    first_orders,
)
from rlinf_async.workers.scheduler.holdings import Holdings

HOME, GROWN = Strategy(), Strategy(dp=2)
TOPOLOGY = Topology(
    instances=((1,), (2,), (0,)),  # the last one is a guest
    actor=(0, 2),
    home=HOME,
    strategies=(HOME, GROWN),
    samples=8,
)
HERE = Boundary(0, 1)


def holdings() -> Holdings:
    made = Holdings(TOPOLOGY, lambda: None)
    made.restore(first_orders(TOPOLOGY))
    return made


def says(instance: int, sequence: int, *devices: int) -> InstanceReport:
    return InstanceReport(
        instance=instance,
        sequence=sequence,
        devices=devices,
        slots=1,
        samples=0,
        tokens=0,
        queued=0,
    )


def rank_says(rank: int, sequence: int, strategy: Strategy, holds: bool = True) -> ActorChanged:
    return ActorChanged(rank=rank, boundary=HERE, sequence=sequence, strategy=strategy, holds=holds)


def test_everyone_begins_at_home_and_guests_hold_nothing() -> None:
    one = holdings()
    assert one.ledger.held_by(ACTOR) == (0,)
    assert [one.of_instance(n) for n in range(3)] == [(1,), (2,), ()]
    assert first_orders(TOPOLOGY).devices == ((1,), (2,), ())


def test_an_instance_that_is_to_stop_holds_its_devices_until_it_says_so() -> None:
    one = holdings()
    assert not one.can_give_actor(2)
    with pytest.raises(DeviceTaken, match=r"rollout\[1\] holds it"):
        one.give_actor(2, 7)
    one.note(says(1, 7))
    assert one.can_give_actor(2)


def test_a_report_on_older_orders_than_those_that_gave_devices_does_not_count() -> None:
    one = holdings()
    one.note(says(1, 4))
    one.give(1, (2,), 6)
    one.note(says(1, 5))  # it was on its way
    assert one.of_instance(1) == (2,)
    one.note(says(1, 8))
    assert one.of_instance(1) == ()


def test_who_changes_devices_holds_both_until_it_has_answered() -> None:
    one = holdings()
    one.note(says(1, 3))
    one.give(0, (2,), 4)
    assert one.of_instance(0) == (1, 2)
    assert not one.can_have(1, (1,))
    one.note(says(0, 4, 2))
    assert one.can_have(1, (1,))


def test_the_actor_holds_a_device_until_the_rank_there_says_that_it_does_not() -> None:
    one = holdings()
    one.note(says(1, 3))
    one.give_actor(2, 4)
    one.note_rank(rank_says(0, 4, GROWN))
    one.note_rank(rank_says(1, 4, GROWN))
    one.give_actor(1, 6)  # to shrink
    ready = ActorReady(boundary=HERE, mini_batches=4, strategy=HOME)
    one.note_rank(rank_says(0, 6, HOME))
    assert not one.knows_actor(ready)
    assert not one.can_have(1, (2,))
    one.note_rank(rank_says(1, 6, HOME))
    assert one.knows_actor(ready)
    assert one.can_have(1, (2,))


def test_the_actor_may_hold_what_it_was_told_to_take_even_where_it_was_told_otherwise_since() -> (
    None
):
    one = holdings()
    one.give_actor(0, 4)  # it lends its devices
    one.give_actor(1, 5)  # no: it did not answer in time
    one.note_rank(rank_says(0, 4, HOME, holds=False))  # it has, and takes them again now
    assert not one.can_have(2, (0,))
    one.note_rank(rank_says(0, 5, HOME))
    assert one.ledger.held_by(ACTOR) == (0,)


def test_a_worker_that_stands_for_several_ranks_releases_the_devices_of_all() -> None:
    topology = msgspec.structs.replace(
        TOPOLOGY,
        instances=((2,), (3,)),
        actor=(0, 1, 2, 3),
        home=Strategy(dp=1, tp=2),
        strategies=(Strategy(dp=1, tp=2), Strategy(dp=2, tp=2)),
        workers=2,
    )
    one = Holdings(topology, lambda: None)
    one.restore(first_orders(topology))
    one.note(says(0, 2))
    one.note(says(1, 2))
    one.give_actor(4, 3)
    one.give_actor(2, 4)
    one.note_rank(rank_says(0, 4, Strategy(dp=1, tp=2)))
    assert one.ledger.held_by(ACTOR) == (0, 1, 2, 3)
    one.note_rank(rank_says(1, 4, Strategy(dp=1, tp=2)))
    assert one.ledger.held_by(ACTOR) == (0, 1)


def test_a_scheduler_after_another_one_knows_no_less() -> None:
    first = holdings()
    first.note(says(1, 3))
    first.give_actor(2, 4)
    orders = msgspec.structs.replace(
        first_orders(TOPOLOGY),
        sequence=4,
        devices=((1,), (), ()),
        held=first.ledger.holdings(),
        lost=(1,),
    )
    second = Holdings(TOPOLOGY, lambda: None)
    second.restore(orders)
    assert second.ledger.held_by(ACTOR) == (0, 2)
    assert second.ledger.lost == (1,)
    second.note(says(0, 3))  # before those orders: it may have taken it again
    assert not second.can_have(1, (1,))
