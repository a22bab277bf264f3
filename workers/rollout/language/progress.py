"""How far the requests of a rollout worker are."""

from __future__ import annotations

import msgspec

from rlinf_async.workers.scheduler.messages import RequestCount


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout worker is doing: counts, no tokens."""

    rank: int
    version: int
    """of the weights that it serves"""
    slots: int
    """requests that its engine decodes together"""
    samples: int
    """samples that it has sent on, since it was started"""
    tokens: int
    """tokens of these samples, prompts left out"""
    requests: tuple[RequestCount, ...]
    """the requests that are here, in the order in which they were taken"""
