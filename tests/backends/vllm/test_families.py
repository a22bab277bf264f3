"""Models with experts in the real engine; ``python -m tests.backends.families`` tries all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.families import TOLERANCE, published_difference, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_vllm_computes_what_the_trainer_does_after_every_update(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")  # as users run it, compiled
    assert published_difference("vllm", tiny(family), tmp_path) < TOLERANCE
