"""Advantages and losses, registered by name and shared by all training backends.

::

    config.py       which ones, and their coefficients (no torch)
    advantages.py   what goes in and out, the table     gae.py
    losses.py       what goes in and out, the table, PPO's formulas
    registry.py     the table itself

A new one is a function and a decorator::

    @register_advantage("mine")
    def mine(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages: ...
"""
