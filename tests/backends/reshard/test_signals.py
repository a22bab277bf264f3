"""Words between ranks: here three "ranks" of one process, whose pipes are real."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from datetime import timedelta

import pytest

from rlinf_async.backends.reshard import PeerLost
from rlinf_async.backends.reshard.signals import DONE, PLACE, Inboxes, Signals


@pytest.fixture
def ranks() -> Iterator[list[Signals]]:
    inboxes = [Inboxes(rank, 3) for rank in range(3)]
    writers = [
        one.open({p: (os.getpid(), inboxes[p].numbers()) for p in range(3) if p != rank})
        for rank, one in enumerate(inboxes)
    ]
    made = [
        Signals(one.readers(), ends, timedelta(seconds=0.2))
        for one, ends in zip(inboxes, writers, strict=True)
    ]
    yield made
    for one in made:
        one.close()


def test_words_of_a_kind_come_in_order_and_other_kinds_wait(ranks: list[Signals]) -> None:
    ranks[1].send(0, DONE, 7)
    ranks[1].send(0, PLACE, 1)
    ranks[1].send(0, PLACE, 2)
    ranks[2].send(0, PLACE, 3)
    assert [ranks[0].wait(1, PLACE) for _ in range(2)] == [1, 2]
    assert ranks[0].wait(2, PLACE) == 3
    assert ranks[0].wait(1, DONE) == 7


def test_a_rank_that_says_nothing_in_time_is_lost(ranks: list[Signals]) -> None:
    with pytest.raises(PeerLost, match="rank 1 was lost, or nothing came from it"):
        ranks[0].wait(1, PLACE)


def test_all_name_the_rank_that_was_lost_first(ranks: list[Signals]) -> None:
    ranks[1].close()
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        ranks[0].wait(1, PLACE)
    ranks[0].close()
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        ranks[2].wait(0, PLACE)


def test_a_word_to_a_rank_that_gave_up_names_whom_it_lost(ranks: list[Signals]) -> None:
    ranks[1].close()
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        ranks[0].send(1, DONE, 0)
    ranks[0].close()
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        ranks[2].send(0, DONE, 0)


def test_what_was_said_before_a_rank_went_is_heard(ranks: list[Signals]) -> None:
    ranks[1].send(0, PLACE, 5)
    ranks[1].close()
    assert ranks[0].wait(1, PLACE) == 5


def test_a_pipe_that_may_not_be_opened_leaves_nothing_open() -> None:
    one, peer = Inboxes(0, 3), Inboxes(1, 3)
    with pytest.raises(OSError, match="No such file"):
        one.open({1: (os.getpid(), peer.numbers()), 2: (os.getpid(), [1 << 20])})
    readers = peer.readers()  # what `one` opened would be the only end that is written to
    assert select.select([readers[0]], [], [], 0)[0]
    assert os.read(readers[0], 1) == b""
    for each in readers.values():
        os.close(each)
    one.close()
