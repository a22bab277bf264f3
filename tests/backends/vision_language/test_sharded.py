from __future__ import annotations

from pathlib import Path

from tests.backends.vision_language.sharded import differences


def test_two_ranks_train_the_policy_like_one(tmp_path: Path) -> None:
    weights, norm = differences(2, tmp_path, of_example=False)
    assert weights < 1e-5
    assert norm < 1e-5
