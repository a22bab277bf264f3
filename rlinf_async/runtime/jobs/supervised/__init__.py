"""The ``sft``, ``dpo`` and ``distill`` jobs: a language model learns from examples that are there
already.

::

    job.py        checks a configuration, and runs it
    config.py     the configurations
    run.py        the flow, from the first step to the exported model
    measures.py   held-out examples and reference log-probs
    teaching.py   what a teacher holds of the examples of a step
"""
