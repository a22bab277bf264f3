"""An exported checkpoint in the real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlinf_async.backends.checkpoint.exporting import Export
from rlinf_async.backends.vllm.config import VllmEngineConfig
from tests.backends.checkpoint.kit import PROMPT, RESPONSE, model_folder, own_log_probs, trained
from tests.backends.vllm.kit import SMALL, Served

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_vllm_computes_what_the_trainer_does(tmp_path: Path, *, tied: bool) -> None:
    trainer = trained(model_folder(tmp_path / "model", tied=tied), tmp_path / "checkpoint")
    Export(tmp_path / "checkpoint", shard_bytes=300_000).run(tmp_path / "out")
    settings = VllmEngineConfig(model=str(tmp_path / "out"), weights="folder", **SMALL)
    with Served(settings) as served:
        [found] = served.run(served.engine.log_probs([(PROMPT, RESPONSE)]))
    assert np.abs(found - own_log_probs(trainer).numpy()).max() < 1e-4
