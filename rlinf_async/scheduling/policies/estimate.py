"""How long an iteration still takes under a layout.

Generating and training overlap: what is trained has been generated before, and the last mini-batch
is trained after the last sample. With ``R`` requests decoded together on each of ``I`` instances::

    decode = tokens left / (I x R) x token time(R)                 while all have enough to do
             + (longest left - mean left) x token time(R / 4)      the tail
    train  = one mini-batch after the other, on all devices once nothing is decoded any more
    left   = the end of the last mini-batch, which begins after the last sample + changes
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision, actor_after, holdings_after
from rlinf_async.scheduling.state import ClusterState, instance_name

TAIL = 4.0
"""longest of many requests over their mean remaining tokens, where no request's own is known"""
LATE = 0.4
"""share of an iteration's decoding in which its groups become complete"""


def seconds_left(decision: ScalingDecision, state: ClusterState) -> float:
    """Predict the seconds until the iteration is trained once the decision is carried out."""
    actor = actor_after(decision, state.actor)
    decode = decode_seconds(decision, state)
    ranks = max(actor.strategy.world_size, 1)
    moving = 0.0
    if decision.stop or decision.migrations:
        moving += state.rates.move_seconds
    if decision.actor is not None or decision.actor_holds is not None:
        moving += state.rates.rescale_seconds
    most = max([ranks, *(one.world_size for one in actor.strategies)])
    grown = _batch_seconds(most, state)
    rescale = state.rates.rescale_seconds
    if not actor.holds:  # it trains nothing before it has its devices again, and then more
        return decode + actor.left * grown + 2 * rescale + moving
    seconds, grows = 0.0, False
    for number in range(actor.left):
        seconds = max(seconds, decode * _arrives(number, state))
        if seconds >= decode and ranks < most:
            grows = True
        seconds += grown if grows else _batch_seconds(ranks, state)
    return max(seconds, decode) + (rescale if grows else 0.0) + moving


def _arrives(number: int, state: ClusterState) -> float:
    """Return the share of the decoding that is left until this mini-batch of those left is here.

    A group arrives with its longest sample: so most arrive late.
    """
    actor = state.actor
    size = state.samples / max(actor.mini_batches, 1)
    if actor.arrived is not None and (number + 1) * size <= actor.arrived:
        return 0.0
    return 1.0 - LATE * (actor.left - 1 - number) / actor.left


def _batch_seconds(ranks: int, state: ClusterState) -> float:
    """Return the seconds of a mini-batch on so many ranks."""
    samples = state.samples / max(state.actor.mini_batches, 1)
    token = state.rates.train_seconds * max(state.tokens, 1.0) / ranks
    return samples * token + state.rates.mini_batch_seconds


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
