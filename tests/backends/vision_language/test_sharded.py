from __future__ import annotations

from pathlib import Path

from tests.backends.vision_language.sharded import differences


def test_two_ranks_train_the_policy_of_the_example_like_one(tmp_path: Path) -> None:
    weights, norm = differences(10, tmp_path)
    assert weights < 1e-5
    assert norm < 1e-5
