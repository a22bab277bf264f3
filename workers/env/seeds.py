"""Seeds of environments and of evaluation episodes, different for any two."""

from __future__ import annotations

from typing import Final

import numpy as np

_TRAINING: Final = 0
_EVALUATION: Final = 1


def env_seed(seed: int, *, rank: int, stage: int, env: int, incarnation: int) -> int:
    """The seed of one environment; it differs after each restart of its worker."""
    return _mix(seed, _TRAINING, rank, stage, env, incarnation)


def episode_seed(seed: int, episode: int) -> int:
    """The seed of one episode of an evaluation, in whichever worker it runs."""
    return _mix(seed, _EVALUATION, episode)


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
