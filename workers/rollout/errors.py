"""Errors of a rollout worker."""

from __future__ import annotations

from rlinf_async.channels import ChannelError


class WeightsEnded(ChannelError):
    """A question asks for newer weights than there are, and no more will be published."""
