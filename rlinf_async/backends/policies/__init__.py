"""Policies by name: ``mlp_gaussian``, ``mlp_categorical``, and those that a user registers.

::

    config.py    name and size of a policy (no torch)
    base.py      the base class, and the registry           mlp.py   the two that are built in
    moments.py   running statistics, published with the weights
    serving.py   a policy that answers observations in numpy
"""
