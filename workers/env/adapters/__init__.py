"""Simulators that make no `gymnasium.Env` of one environment by themselves, as entry points.

Each module has a function ``make`` for ``env.entry_point``; a package is imported when it is
called.
"""
