"""`CostTrainer` takes the seconds of its cost model."""

from __future__ import annotations

import pytest

from rlinf_async.backends.cost.config import CostTrainerConfig
from rlinf_async.backends.cost.trainer import CostTrainer
from rlinf_async.deadlines import taking_time
from tests.backends.language.kit import samples

CONFIG = CostTrainerConfig(token_seconds=0.01, sample_seconds=0.5, beside_generation=1.5)
BATCH = samples(groups=1)


def seconds_of(trainer: CostTrainer) -> float:
    taken: list[float] = []
    with taking_time(taken.append):
        trainer.micro_batch(BATCH)
    return sum(taken)


def test_a_micro_batch_takes_the_seconds_of_its_tokens_and_of_its_samples() -> None:
    tokens = sum(one.tokens for one in BATCH)
    assert seconds_of(CostTrainer(CONFIG, 1, 0)) == pytest.approx(tokens * 0.01 + len(BATCH) * 0.5)


def test_tensor_parallel_ranks_share_the_tokens_and_not_what_a_micro_batch_takes_anyway() -> None:
    tokens = sum(one.tokens for one in BATCH)
    assert seconds_of(CostTrainer(CONFIG, 1, 0, tp=2)) == pytest.approx(
        tokens * 0.005 + len(BATCH) * 0.5
    )


def test_beside_generation_it_takes_longer() -> None:
    alone = seconds_of(CostTrainer(CONFIG, 1, 0))
    beside = seconds_of(CostTrainer(CONFIG, 1, 0, beside=lambda: True))
    assert beside == pytest.approx(1.5 * alone)


def test_nothing_becomes_faster_beside_generation() -> None:
    with pytest.raises(ValueError, match=r"beside_generation is 0\.5; it must be at least 1"):
        CostTrainerConfig(token_seconds=0.01, beside_generation=0.5)
