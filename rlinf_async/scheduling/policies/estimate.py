"""How long an iteration still takes under a layout.

Generating and training overlap: what is trained has been generated before, and the last mini-batch
is trained after the last sample. With ``R`` requests decoded together on each of ``I`` instances::

    decode = tokens left / (I x R) x token time(R)                 while all have enough to do
             + (longest left - mean left) x token time(R / 4)      the tail
    train  = mini-batches left but one x time of a mini-batch / ranks
    left   = max(decode, train) + time of the last mini-batch + changes
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision, actor_after, holdings_after
from rlinf_async.scheduling.state import ClusterState, instance_name

TAIL = 4.0
"""longest of many requests over their mean remaining tokens, where no request's own is known"""


def seconds_left(decision: ScalingDecision, state: ClusterState) -> float:
    """Predict the seconds until the iteration is trained once the decision is carried out."""
    actor = actor_after(decision, state.actor)
    decode = decode_seconds(decision, state)
    ranks = max(actor.strategy.world_size, 1)
    per_batch = state.samples / max(actor.mini_batches, 1)
    token = state.rates.train_seconds * max(state.tokens, mean_expected(state), 1.0) / ranks
    batch = per_batch * token + state.rates.mini_batch_seconds
    moving = 0.0
    if decision.stop or decision.migrations:
        moving += state.rates.move_seconds
    if decision.actor is not None or decision.actor_holds is not None:
        moving += state.rates.rescale_seconds
    if not actor.holds:  # it trains nothing before it has its devices again
        return decode + actor.left * batch + state.rates.rescale_seconds + moving
    return max(decode, (actor.left - 1) * batch) + (batch if actor.left else 0.0) + moving


def decode_seconds(decision: ScalingDecision, state: ClusterState) -> float:
    """Predict the seconds until every request is generated."""
    holdings = holdings_after(decision, state)
    widths = [
        len(held) / max(len(one.home), 1)
        for one in state.instances
        if (held := holdings[instance_name(one.number)])
    ]
    requests = sum(one.load for one in state.instances) + state.queued
    requests = max(requests, state.unfinished if state.phase == "begin" else 0)
    if not requests:
        return 0.0
    if not widths:
        return float("inf")
    slots = max((one.slots for one in state.instances), default=1)
    running = min(max(requests / len(widths), 1.0), slots)
    width = sum(widths) / len(widths)
    mean = mean_expected(state)
    tokens = mean * requests
    busy = tokens / (len(widths) * running) * state.rates.token_seconds(running, width)
    longest = longest_expected(state) or TAIL * mean
    tail = max(longest - mean, 0.0) * state.rates.token_seconds(max(1.0, running / TAIL), width)
    return busy + tail


def mean_expected(state: ClusterState) -> float:
    """Return the mean number of tokens that an unfinished request has still to come."""
    count = sum(one.load for one in state.instances) + state.queued
    total = sum(one.expected for one in state.instances) + state.queued_expected
    return total / count if count and total > 0.0 else max(state.tokens, 1.0)


def longest_expected(state: ClusterState) -> float:
    """Return the most tokens that a known request has still to come; 0: none is known."""
    known = [request.expected for one in state.instances for request in one.requests]
    known += [request.expected for request in state.queued_requests]
    return max(known, default=0.0)
