"""What an actor cannot go on after."""

from __future__ import annotations


class WeightsDisagree(RuntimeError):
    """An engine's log-probs are not the actor's; the message has both, and where."""


class IncompleteShare(RuntimeError):
    """Fewer samples came than an iteration has; the message has the numbers."""
