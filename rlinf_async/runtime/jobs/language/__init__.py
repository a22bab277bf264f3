"""The ``language_rl`` job: reinforcement learning of a language model on verifiable tasks.

::

    job.py          checks a configuration, and runs it
    config.py       the configuration
    checks/         whether it can be run
    backends.py     what trains and generates: configuration and devices of each backend
    roles.py        channels; rollout, inference and reward workers, actors, critics
    run.py          the flow, from the first prompt to the evaluation
    samples.py      admission, the ledger, collection into groups, what a checkpoint holds of them
    reports.py      metrics, the live view, evaluation, warnings, the summary
    model.py        the model's folder, before the run and after it
    schedulable.py, scheduling.py    devices that change their roles
"""
