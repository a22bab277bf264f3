"""Workers of a local cluster build their models in threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_async.backends.transformers.reward_model import RewardModel
from tests.backends.classifiers import save_classifier

ROUNDS = 10


def test_models_that_are_loaded_at_once_leave_transformers_as_it_was(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_classifier(tmp_path / "rm", "qwen3")
    ties = transformers.PreTrainedModel.tie_weights
    together = threading.Barrier(3)

    def load() -> None:
        for _ in range(ROUNDS):
            together.wait(60.0)
            RewardModel(str(folder), "cpu", "float32", 100)

    def started(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    for thread in [started(load) for _ in range(3)]:
        thread.join()
    assert transformers.PreTrainedModel.tie_weights is ties
