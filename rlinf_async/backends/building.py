"""Building models, one at a time in a process.

Workers of a local cluster are threads of one process, and building depends on what is global to it:
torch's random numbers, and what transformers changes meanwhile and changes back: the default dtype,
the functions that fill new weights, and the one that ties an output layer to the embedding. Of two
threads that load at once, the second would keep what the first had changed: no model of the process
would be tied from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

one_at_a_time = RLock()
"""held wherever transformers makes a model; a thread that builds may hold it again"""


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Draw torch's random numbers on the CPU from the seed in the block; restore them after it."""
    with one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
