"""Rates are found again in measurements that were made by them."""

from __future__ import annotations

import pytest

from rlinf_async.parallel import Strategy
from rlinf_async.workers.scheduler.messages import EndedCount
from rlinf_async.workers.scheduler.monitor import MeasuredRates


def ended(running: int, made: int = 100) -> EndedCount:
    seconds = made * (0.01 + 0.001 * running)
    return EndedCount(group=0, tokens=made, made=made, seconds=seconds, running=running)


def test_nothing_is_known_at_first() -> None:
    assert not MeasuredRates().rates().known


def test_costs_are_fitted_to_what_was_measured() -> None:
    measured = MeasuredRates()
    measured.decoded([ended(running) for running in (4, 8, 20)])
    measured.decoded([EndedCount(group=0, tokens=3, made=3, seconds=9.0, running=4)])  # too short
    for tokens in (1000, 3000):
        measured.trained(tokens, 0.5 + tokens / 2 * 1e-3, Strategy(dp=2, tp=2))
    measured.trained(0, 5.0, Strategy(dp=2, tp=2))  # it was idle
    measured.changes.append(3.0)
    measured.changes.append(5.0)
    measured.moves.append(2.0)
    rates = measured.rates()
    assert rates.known
    assert rates.decode_seconds == pytest.approx(0.01)
    assert rates.sequence_seconds == pytest.approx(0.001)
    assert rates.train_seconds == pytest.approx(1e-3)
    assert rates.mini_batch_seconds == pytest.approx(0.5)
    assert (rates.rescale_seconds, rates.move_seconds) == (4.0, 2.0)


def test_of_loads_that_are_all_alike_decoding_is_constant_and_training_proportional() -> None:
    measured = MeasuredRates()
    measured.decoded([ended(8)] * 3)
    measured.trained(1000, 2.0, Strategy(dp=1))
    rates = measured.rates()
    assert rates.decode_seconds == pytest.approx(0.018)
    assert rates.sequence_seconds == 0.0
    assert rates.train_seconds == pytest.approx(2e-3)
    assert rates.mini_batch_seconds == 0.0
