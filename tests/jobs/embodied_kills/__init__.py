"""Runs in environments whose workers, driver and environments are killed, or hang, at random.

::

    __main__.py   python -m tests.jobs.embodied_kills --count 20 --seed 0
    plan.py       what a seed means: the job, its settings, who is killed or hangs when
    driven.py     the driver of a run, which carries that out
    hanging.py    an environment that hangs when it is asked to
    person.py     who acts in its place now and then
    accounts.py   what the run says it did, against what it had to do
"""
