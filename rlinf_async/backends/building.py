"""Building a model from a seed, one at a time in a process.

Workers of a local cluster are threads of one process, and building depends on what is global to it:
torch's random numbers, the default dtype that transformers sets meanwhile, and the functions that
fill new weights, which are none while an engine is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_one_at_a_time = Lock()


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Draw torch's random numbers on the CPU from the seed in the block; restore them after it."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
