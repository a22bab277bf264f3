"""The chain of a flow policy's answer lies beside the action to which it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_async.messages.embodied import Actions, Collect
from rlinf_async.workers.env.record import Record
from rlinf_async.workers.env.stage import StageOutcome


@pytest.mark.parametrize("together", [True, False], ids=["together", "as they get ready"])
def test_chains_stay_with_their_actions(together: bool) -> None:
    ticket = Collect(iteration=0, steps=2, min_version=0)
    record = Record(ticket, 0, 0, np.zeros((3, 1), np.float32))
    orders = [None, None] if together else [[0, 2], [1], [0, 1], [2]]
    drawn = np.random.default_rng(0)
    for sequence, order in enumerate(orders):
        rows = None if order is None else np.array(order)
        count = 3 if rows is None else len(rows)
        chain = drawn.normal(size=(count, 6)).astype(np.float32)
        zeros, no = np.zeros(count, np.float32), np.zeros(count, np.bool_)
        answer = Actions(
            incarnation=0,
            sequence=sequence,
            action=chain[:, -2:],
            log_prob=zeros,
            value=zeros,
            final_value=None,
            version=0,
            chain=chain,
        )
        record.acted(np.zeros((count, 1), np.float32), answer, rows)
        record.stepped(StageOutcome(zeros, no, no, None, [], rows=rows))
    assert record.full
    nothing = np.zeros(3, np.float32)
    last = Actions(
        incarnation=0, sequence=9, action=None, log_prob=None, value=nothing, final_value=None,
        version=0,
    )  # fmt: skip
    made = record.finish(last)
    assert made.chain is not None
    assert made.chain.shape == (2, 3, 6)
    np.testing.assert_array_equal(made.chain[..., -2:], made.action)
    assert len(np.unique(made.chain)) == 36
