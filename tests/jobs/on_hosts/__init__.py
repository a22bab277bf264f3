"""Both jobs on a Ray cluster of three hosts, some of which are killed.

::

    hosts.py      three hosts on this machine, each a network namespace, with a Ray node
    observer.py   what Ray says is there: hosts, actors, placement groups
    driven.py     the driver of a run; notes what channels carried and what was trained
    runs.py       a run, what became of its items, and what it left
    plan.py       a seed's run: which job, who is killed, and when
    kills.py      ``python -m tests.jobs.on_hosts.kills``: runs with random kills
    ends.py       ``python -m tests.jobs.on_hosts.ends``: what each way to end leaves
"""
