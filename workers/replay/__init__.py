"""Replay: a bounded store of transitions, from which batches are drawn.

::

    worker.py   the worker: takes trajectories, answers requests for batches; settings
    store.py    trajectories -> transitions of up to n steps, in memory or in memory-mapped files
    columns.py  what a store keeps of a transition
    images.py   its images, where they are compressed
"""
