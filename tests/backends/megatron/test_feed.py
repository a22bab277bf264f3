"""A global batch without samples is an error on every rank of a model, not a wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_async.backends.megatron.feed import NO_SAMPLES
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.megatron.test_manager import learn, made

pytest.importorskip("megatron.core")

STRATEGIES: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}


def train_on_nothing(rank: int, world_size: int, folder: Path) -> None:
    found = {}
    for name, fields in STRATEGIES.items():
        trainer = made(world_size, rank, **fields)
        errors = []
        for step in (trainer.training_step, trainer.forward_backward):
            with pytest.raises(ValueError, match="no samples") as caught:
                step(iter(()))
            errors.append(str(caught.value))
        pending = trainer.manager.pending
        found[name] = {
            "errors": errors,
            "pending": pending,
            "norms": learn(trainer, 2),
            "expected": learn(made(world_size, rank, **fields), 2),
        }
    save_result(folder, rank, found)


def test_without_samples_every_rank_raises_and_training_goes_on(tmp_path: Path) -> None:
    for result in in_processes(train_on_nothing, 2, tmp_path):
        assert result.keys() == STRATEGIES.keys()
        for found in result.values():
            assert found["errors"] == [NO_SAMPLES, NO_SAMPLES]
            assert not found["pending"]
            assert found["norms"] == found["expected"]
