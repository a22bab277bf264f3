"""Errors of environments.

::

    EnvError                 an environment cannot be used, or failed while it ran
    +-- EnvFailed            it raised, or returned NaN: names env, step and seed
    RolloutGone              no rollout worker is left that could answer (a ChannelError)

A wrong configuration raises `rlinf_async.config.UsageError` before any environment is made.
"""

from __future__ import annotations

from rlinf_async.channels import ChannelError


class EnvError(RuntimeError):
    """The environment cannot be used: its spaces, or what was answered for them, do not fit."""


class EnvFailed(EnvError):
    """One environment raised, or returned NaN or infinity."""


class RolloutGone(ChannelError):
    """The channel of answers has ended while a question was open."""
