"""The ``embodied_sac`` job: soft actor-critic with a replay worker, on Gymnasium environments.

::

    job.py         checks a configuration, and runs it
    run.py         the flow, from the first ticket to the evaluation
    config.py      the configuration, and the channels between replay worker and actor

Settings, tickets, collectors, evaluation and reports are those of
`rlinf_async.runtime.jobs.embodied`.
"""
