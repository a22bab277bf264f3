"""Random episodes over real rollout workers, while everything dies and moves."""

from __future__ import annotations

import pytest

from rlinf_async.testing import run
from tests.workers.episode.wandering import wander


@pytest.mark.parametrize("seed", range(4))
def test_random_episodes_come_once_each_with_what_was_drawn_for_them(seed: int) -> None:
    run(wander(seed, 50), max_steps=100_000_000)
