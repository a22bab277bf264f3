"""Replay: a bounded store of transitions, from which batches are drawn.

::

    worker.py       the worker: takes trajectories, answers requests for batches
    transitions.py  trajectories -> transitions of up to n steps
    store.py        the store, in memory or in memory-mapped files
    sum_tree.py     drawing in proportion to priorities
    config.py       settings
"""

from rlinf_async.workers.replay.config import ReplayConfig
from rlinf_async.workers.replay.errors import ReplayError
from rlinf_async.workers.replay.worker import ReplayReport, ReplayWorker

__all__ = ["ReplayConfig", "ReplayError", "ReplayReport", "ReplayWorker"]
