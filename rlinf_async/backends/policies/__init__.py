"""Policies by name: ``mlp_gaussian``, ``mlp_categorical``, and what a user registers.

::

    config.py    which policy, and its size (no torch)
    base.py      what every policy is, and the table        mlp.py   the two that are built in
    moments.py   running statistics that travel with the weights
    serving.py   a policy that answers observations in numpy
"""
