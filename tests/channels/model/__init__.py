"""Random programs over channels, checked against a model and against what the docs promise.

::

    program      a program as plain data: tasks, their operations, the channel, faults
    generate     programs by seed, quickly; strategies: the same by hypothesis
    party        carries one task out, over whichever end, and records what came of it
    history      what was recorded
    stage        the owner of the channel: starts the tasks, looks when all wait, ends everything
    local        under virtual time, every order of tasks; sockets: over a Unix socket or TCP,
                 both sides in one loop; processes: real processes, some of them killed
    check        what must hold of any history; order: that of the items of one key
    reference    a channel as a sequential model; differential: compares it step by step
    shrink       the smallest program that still fails

``python -m tests.channels.model --transport unix --count 1000 --seed 0`` runs many.
"""
