"""Replay: a bounded store of transitions, from which batches are drawn.

::

    worker.py   the worker: takes trajectories, answers requests for batches; settings
    store.py    trajectories -> transitions of up to n steps, in memory or in memory-mapped files
"""
