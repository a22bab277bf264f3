"""The ``world_model`` job: what an environment shows and pays, and when it ends, is learnt from
recorded episodes.

::

    job.py      checks a configuration, and runs it
    config.py   the configuration
    run.py      the flow, from the recorded episodes to the model's file
"""
