"""The reference itself, and the channel compared with it step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.channels.model import differential
from tests.channels.model.differential import differences
from tests.channels.model.kit import hold
from tests.channels.model.program import Op, Program, Task
from tests.channels.model.reference import Entry, Lane, Reference
from tests.channels.model.strategies import programs


def channel(
    capacity: int = 64, max_weight: int | None = None, max_deliveries: int = 5
) -> tuple[Reference, int, int]:
    """A reference with a sender and a receiver."""
    made = Reference(capacity, max_weight, max_deliveries)
    sender = made.open_sender()
    assert isinstance(sender, int)
    return made, sender, made.open_receiver()


def test_items_come_out_in_the_order_in_which_they_were_put() -> None:
    made, sender, receiver = channel()
    for item in range(4):
        made.put(sender, item, None, 1)
    assert [made.take(receiver, None).items for _ in range(4)] == [[0], [1], [2], [3]]


def test_a_put_waits_for_room_and_a_cancelled_one_leaves_nothing() -> None:
    made, sender, receiver = channel(capacity=1)
    made.put(sender, 0, None, 1)
    waiting, behind = made.put(sender, 1, None, 1), made.put(sender, 2, None, 1)
    made.cancel(waiting)
    assert (waiting.outcome, behind.outcome) == ("cancelled", "")
    assert made.take(receiver, None).items == [0]
    assert behind.outcome == "ok"
    assert made.take(receiver, None).items == [2]


def test_one_heavier_item_is_let_in_where_there_is_nothing() -> None:
    made, sender, receiver = channel(max_weight=3)
    heavy, light = made.put(sender, 0, None, 9), made.put(sender, 1, None, 1)
    assert (heavy.outcome, light.outcome) == ("ok", "")
    assert made.take(receiver, None, 4).items == [0]
    assert light.outcome == "ok"


def test_a_batch_has_whole_items_and_what_is_left_at_the_end() -> None:
    made, sender, receiver = channel()
    for item, weight in enumerate((1, 3, 2, 8, 1)):
        made.put(sender, item, None, weight)
    made.close(sender)
    batches = [made.take(receiver, None, 4) for _ in range(5)]
    assert [batch.items for batch in batches] == [[0, 1], [2], [3], [4], []]
    assert batches[-1].outcome == "EndOfChannel"


def test_a_batch_comes_with_at_least_so_much_when_nothing_more_is_there() -> None:
    made, sender, receiver = channel()
    waiting = made.take(receiver, None, 4, 2)
    made.put(sender, 0, None, 1)
    assert not waiting.outcome
    made.put(sender, 1, None, 1)
    assert waiting.items == [0, 1]


def test_a_failed_lease_goes_back_to_the_head_until_it_is_given_up() -> None:
    made, sender, receiver = channel(max_deliveries=2)
    for item in range(2):
        made.put(sender, item, None, 1)
    for delivery in (1, 2):
        lease = made.take(receiver, None, lease=True)
        assert (lease.items, lease.deliveries) == ([0], [delivery])
        made.give_back(lease)
    assert made.dead == [(0, 2)]
    assert made.take(receiver, None).items == [1]


def test_a_channel_has_not_ended_while_somebody_holds_a_lease() -> None:
    made, sender, receiver = channel()
    made.put(sender, 0, None, 1)
    lease = made.take(receiver, None, lease=True)
    made.close(sender)
    waiting = made.take(receiver, None)
    assert made.lanes[None].turns == [[waiting]]
    made.acknowledge(lease)
    assert waiting.outcome == "EndOfChannel"


def test_receivers_are_served_in_turn() -> None:
    made, sender, greedy = channel()
    modest = made.open_receiver()
    takes = [made.take(end, None) for end in (greedy, greedy, greedy, modest)]
    for item in range(4):
        made.put(sender, item, None, 1)
    assert [take.items for take in takes] == [[0], [2], [3], [1]]


def test_what_nobody_can_take_is_refused() -> None:
    made, sender, receiver = channel(capacity=1)
    made.put(sender, 0, None, 1)
    waiting = made.put(sender, 1, None, 1)
    made.close(receiver)
    assert (waiting.outcome, made.put(sender, 2, "env", 1).outcome) == ("NoReceivers",) * 2
    made.fail(sender)
    assert made.put(sender, 3, None, 1).outcome == "ChannelFailed"


def test_the_channel_does_what_the_reference_does() -> None:
    hold(range(400), "steps")


@settings(max_examples=60)
@given(programs())
def test_the_channel_does_what_the_reference_does_whatever_hypothesis_thinks_of(
    program: Program,
) -> None:
    assert differences(program) == []


class _NewestFirst(Reference):
    """What is given back goes to the end."""

    def _return(self, lane: Lane, entries: list[Entry]) -> None:
        lane.entries = [*lane.entries, *entries]


class _NeverFull(Reference):
    def _fits(self, lane: Lane, weight: int) -> bool:
        return True


class _NeverGivesUp(Reference):
    def __init__(self, capacity: int, max_weight: int | None, max_deliveries: int) -> None:
        super().__init__(capacity, max_weight, 100)


@pytest.mark.parametrize("wrong", [_NewestFirst, _NeverFull, _NeverGivesUp])
def test_a_difference_is_found(wrong: type[Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "Reference", wrong)
    lease = Op("lease", 3, ending="fail")
    takes = Task("take", (lease, Op("get", 3)))
    program = Program((Task("send", (Op("put", 4),)), takes), capacity=2, max_deliveries=2)
    assert any(
        differences(Program(program.tasks, capacity=2, max_deliveries=2, seed=seed))
        for seed in range(10)
    )
