"""The ``embodied_offline`` job: a policy that learns from demonstrations alone, and is evaluated in
its environment.

::

    job.py         checks a configuration, and runs it
    run.py         the flow: that of `rlinf_async.runtime.jobs.embodied_sac`, without trajectories
    config.py      the configuration
"""
