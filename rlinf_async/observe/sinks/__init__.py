"""Sinks: where the rows of a run's metrics go besides ``metrics.csv``.

::

    part         what a sink says about itself; what it is told about its run
    config       the section ``[observe]``
    opened       the sinks of one run
    process      a sink in a process of its own, as the run sees it
    messages     what the two say to each other
    child        the same process from inside
    wandb  mlflow  trackio  prometheus      one file each: settings, checks, client

The libraries start threads and processes, take signals, print, and wait for servers. Each has a
process of its own, with the run folder's ``sinks/`` as its working directory: the run hands rows
over and never waits. That process ends with the run's, however the run ends.
"""
