"""What training takes is told apart from waiting for other ranks, and from sharing cores."""

from __future__ import annotations

import pytest

from rlinf_async.observe.trace import Span, by_worker
from rlinf_async.simulate.calibrate import ENOUGH, training_costs

SAMPLES, TOKEN, SAMPLE, STEP = 4, 1e-3, 0.02, 0.3
NUMBER = 2 * ENOUGH
"""micro-batches"""


def tokens_of(number: int) -> int:
    return 50 + 37 * number % 100


def seconds_of(number: int) -> float:
    return TOKEN * tokens_of(number) + SAMPLE * SAMPLES


def span(worker: str, name: str, start: float, end: float, **args: int) -> Span:
    return Span(worker, name, round(start * 1e9), round((end - start) * 1e9), {**args})


def iteration(*, beside: float = 1.0, late: float = 0.0, wait: float = 0.0) -> list[Span]:
    """Two ranks, the other of which comes late to each micro-batch. The first half of those takes
    ``beside`` times as long, and is trained while somebody generates."""
    spans, now = [], 10.0
    for number in range(NUMBER):
        slower = beside if number < NUMBER // 2 else 1.0
        labels = {"iteration": 1, "samples": SAMPLES, "tokens": tokens_of(number)}
        begin, now = now, now + late + slower * seconds_of(number)
        for rank, start in enumerate((begin, begin + late)):
            worker = f"actor[{rank}]"
            spans += [span(worker, name, start, now, **labels) for name in ("micro-batch", "train")]
            spans.append(span(worker, "wait samples", now, now + wait, iteration=1))
        now += wait
        if number == NUMBER // 2 - 1 and beside > 1.0:
            spans.append(span("rollout[0]", "generate", 0.0, now - wait / 2))
    for rank in range(2):
        spans.append(span(f"actor[{rank}]", "train", now, now + STEP + rank, iteration=1))
    return spans


def test_waiting_for_another_rank_is_no_work() -> None:
    found = training_costs(by_worker(iteration(late=0.7)), [1])
    assert found is not None
    assert found.token_seconds == pytest.approx(TOKEN, rel=1e-4)
    assert found.sample_seconds == pytest.approx(SAMPLE, rel=1e-4)
    assert found.iteration_seconds == pytest.approx(STEP, rel=1e-4)


def test_what_is_trained_beside_generation_is_told_apart() -> None:
    found = training_costs(by_worker(iteration(beside=1.8)), [1])
    assert found is not None
    assert found.beside_generation == pytest.approx(1.8, rel=1e-4)
    assert found.token_seconds == pytest.approx(TOKEN, rel=1e-4)


def test_handing_over_counts_to_the_samples() -> None:
    wait = 0.01
    found = training_costs(by_worker(iteration(wait=wait)), [1])
    assert found is not None
    assert found.sample_seconds == pytest.approx(SAMPLE + wait / SAMPLES, rel=1e-4)


def test_waiting_for_samples_does_not() -> None:
    spans = iteration(beside=1.8)
    spans.append(span("actor[0]", "wait samples", 1.0, 10.0, iteration=1))
    found = training_costs(by_worker(spans), [1])
    assert found is not None
    assert found.sample_seconds == pytest.approx(SAMPLE, rel=1e-4)


def test_without_micro_batches_there_are_no_costs() -> None:
    assert training_costs(by_worker(iteration()), [2]) is None
