"""Advantages and losses, registered by name and shared by all training backends.

::

    config.py       names and coefficients (no torch)
    advantages.py   what goes in and out, the table, GAE, group-relative advantages
    losses.py       what goes in and out, the table, the formulas of PPO and SAC
    off_policy.py   samples that are left out of a step (no torch)
    language/       the same over tokens

A new one is a function and a decorator::

    @register_advantage("mine")
    def mine(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages: ...
"""
