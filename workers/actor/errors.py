"""Errors of actors and critics."""

from __future__ import annotations


class WeightsDisagree(RuntimeError):
    """An engine's log-probs differ from the actor's; the message has both, and the token."""


class IncompleteShare(RuntimeError):
    """Fewer samples arrived than an iteration has; the message has the numbers."""
