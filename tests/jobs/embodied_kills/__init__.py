"""Runs in environments whose workers and driver are killed at random.

::

    __main__.py   python -m tests.jobs.embodied_kills --count 20 --seed 0
    plan.py       what a seed means: the job, its settings, who is killed when
    driven.py     the driver of a run, which carries the kills out
    accounts.py   what the run says it did, against what it had to do
"""
