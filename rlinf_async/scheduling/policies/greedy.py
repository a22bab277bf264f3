"""`Greedy`, by a forecast: how long an iteration still takes, for each way in which it can go on.

A model of what is left, in closed form. Of ``N`` unfinished responses with a mean of ``m`` and at
most ``M`` tokens to come, the share that has more than ``x`` to come is taken to be

    S(x) = (1 - x / M) ** k,    k = M / m - 1        (mean m; exponential-like, and it ends at M)

All advance together, so ``x`` is a clock. With ``N S(x)`` responses on ``I`` instances a token
takes `Rates.token_seconds` (N S(x) / I), and longer by the queue where there are more than slots. A
group trains as a whole: the ``j``-th of ``n`` mini-batches is there once a share ``j / n`` of the
groups is, ``(1 - u S(x)) ** G = j / n`` with groups of ``G`` and a share ``u`` of samples
unfinished.

A *plan* says at which ``x`` the actor takes devices, and how many; once nothing is left to generate
it takes all. Plans cost a dozen evaluations of ``S`` each, so a policy can compare all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlinf_async.parallel import Strategy
from rlinf_async.scheduling.policies.simple import (
    IterationPolicy,
    at_least_home,
    grow_to,
    has_work,
    larger_strategies,
    lend,
    release,
    take_back,
    take_most,
)
from rlinf_async.scheduling.state import ClusterState, ScalingDecision

LONGEST = 4.0
"""most tokens over mean tokens to come, where a response has no known limit"""
POINTS = 24
"""values of ``x`` at which `S` is taken"""


@dataclass(frozen=True)
class IterationPlan:
    """One way to go on."""

    seconds: float
    """seconds until the iteration is trained"""
    waits: float
    """seconds until the actor changes; 0: now"""
    strategy: Strategy | None
    """strategy of the actor until everything is generated; None: it has no devices until then"""


class Forecast:
    """Predicts from one state.

    Args:
        state: what is known.
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self._rates = state.rates
        self._home = max(1, min((len(one.home) for one in state.instances), default=1))
        self._slots = max(1, min((one.slots for one in state.instances), default=1))

    # -- what is left -------------------------------------------------------------------------

    @cached_property
    def requests(self) -> int:
        """Unfinished responses."""
        count = sum(one.load for one in self.state.instances) + self.state.queued
        return max(count, self.state.unfinished if self.state.phase == "begin" else 0)

    @cached_property
    def made(self) -> float:
        """Mean tokens of the responses that have begun."""
        count = sum(one.load for one in self.state.instances)
        return sum(one.made for one in self.state.instances) / count if count else 0.0

    @cached_property
    def mean(self) -> float:
        """Mean tokens that a response has still to come."""
        state = self.state
        count = sum(one.load for one in state.instances) + state.queued
        total = sum(one.expected for one in state.instances) + state.queued_expected
        return total / count if count and total > 0.0 else max(state.tokens, 1.0)

    @cached_property
    def most(self) -> float:
        """Tokens that a response has still to come at most."""
        state = self.state
        known = [request.made for one in state.instances for request in one.requests]
        least = min(known, default=self.made)
        limit = state.longest - least if state.longest else LONGEST * self.mean
        return max(limit, self.mean * 1.05)

    @cached_property
    def _power(self) -> float:
        return max(self.most / self.mean - 1.0, 0.05)

    def share_beyond(self, x: float) -> float:
        """Return the share of the responses with more than ``x`` tokens to come."""
        return float(max(0.0, 1.0 - x / self.most) ** self._power)

    def _where(self, share: float) -> float:
        """Return the tokens at which so large a share is left."""
        left: float = min(1.0, share) ** (1.0 / self._power)
        return self.most * (1.0 - left)

    @cached_property
    def end(self) -> float:
        """Tokens until the last response is done."""
        return self.most if self.requests else 0.0

    def arrives(self, number: int) -> float:
        """Return the tokens until the mini-batch of this number (of all, from 1) is there."""
        state, actor = self.state, self.state.actor
        first = actor.mini_batches // max(actor.epochs, 1)  # further epochs train the same samples
        here = actor.mini_batches_done + (actor.arrived or 0) / self.batch_samples
        if number <= here or not self.requests:
            return 0.0
        if number >= first:
            return self.end
        groups = (number / first) ** (1.0 / max(state.group, 1))
        unfinished = self.requests / state.samples
        return min(self._where((1.0 - groups) / unfinished), self.end)

    # -- seconds ------------------------------------------------------------------------------

    def decode_seconds(self, units: float, width: float, begin: float, end: float) -> float:
        """Return the seconds from ``begin`` to ``end`` tokens.

        Args:
            units: devices of rollout over those of an instance at home.
            width: devices of an instance over those at home.
            begin: tokens.
            end: tokens.
        """
        if end <= begin:
            return 0.0
        if units <= 0.0:
            return math.inf
        step = (end - begin) / POINTS
        total = 0.0
        for point in range(POINTS):
            running = self.requests * self.share_beyond(begin + (point + 0.5) * step)
            total += step * self._token_seconds(running, units, width)
        return total

    @property
    def batch_samples(self) -> float:
        """Samples of a mini-batch."""
        actor = self.state.actor
        return self.state.samples * actor.epochs / max(actor.mini_batches, 1)

    def _token_seconds(self, responses: float, units: float, width: float) -> float:
        running = responses / max(1.0, units / width)
        together = min(max(running, 1.0), self._slots)
        return max(1.0, running / self._slots) * self._rates.token_seconds(together, width)

    def batch_seconds(self, ranks: int) -> float:
        """Return the seconds of a mini-batch on ``ranks`` ranks."""
        tokens = self.batch_samples * max(self.state.tokens, 1.0)
        return tokens * self._rates.train_seconds / ranks + self._rates.mini_batch_seconds

    def move_seconds(self, moved: float, width: float) -> float:
        """Return the seconds that an instance of ``width`` loses when it takes over ``moved``
        responses."""
        prefill = moved * self.made * self._rates.prefill_seconds
        faster: float = max(1.0, width) ** self._rates.wider
        return self._rates.move_seconds + prefill / faster

    def token_seconds(self, units: float, width: float) -> float:
        """Return the seconds of a token now, in the mean of all responses, if instances were so
        wide."""
        return self._token_seconds(self.requests, units, width)

    # -- layouts ------------------------------------------------------------------------------

    @cached_property
    def width(self) -> float:
        """Mean width of the instances that serve."""
        widths = [len(one.devices) / self._home for one in self.state.serving]
        return sum(widths) / len(widths) if widths else 1.0

    def units(self, ranks: int = 0, *, guests: bool = False) -> float:
        """Return the devices of rollout beside ``ranks`` ranks of the actor, over those of an
        instance at home; ``guests``: with the instances on the actor's devices."""
        taken = set(self.state.actor.devices[:ranks])
        devices = 0
        for one in self.state.instances:
            held = one.devices or (one.home if guests and self.state.is_guest(one) else ())
            if taken.isdisjoint(held):
                devices += len(held)
        return devices / self._home

    # -- plans --------------------------------------------------------------------------------

    def holding(self, strategy: Strategy) -> IterationPlan:
        """The actor trains with this strategy from now on."""
        actor = self.state.actor
        change = 0.0 if strategy == actor.strategy and actor.holds else self._rates.rescale_seconds
        moved = self._moved(strategy.world_size, self.units())
        return self._timed(0.0, strategy, self.units(strategy.world_size), change, moved)

    def lending(self, strategy: Strategy | None, number: int) -> IterationPlan:
        """The actor lends its devices until the mini-batch of this number is there, and takes
        those of this strategy then; None: until everything is generated."""
        begin = self.end if strategy is None else self.arrives(number)
        guests = self.state.phase == "begin"
        all_units = self.units(guests=guests)
        rest = all_units - (strategy.world_size / self._home if strategy else 0)
        change = self._rates.rescale_seconds
        moved = self._moved(strategy.world_size if strategy else 0, all_units)
        return self._timed(begin, strategy, rest, change, moved, before=all_units)

    def _moved(self, ranks: int, units: float) -> float:
        """Responses that each instance beside the ranks takes over from those that stop."""
        rest = units - ranks / self._home
        return self.requests / rest - self.requests / units if 0.0 < rest < units else 0.0

    def _timed(
        self,
        taken: float,
        strategy: Strategy | None,
        rest: float,
        change: float,
        moved: float,
        before: float = 0.0,
    ) -> IterationPlan:
        """Return the plan in which the actor has ``strategy`` from ``taken`` tokens on."""
        width = max(1.0, self.width)
        first = self.decode_seconds(before, width, 0.0, taken)

        def clock(x: float) -> float:
            if x <= taken:
                return first * x / taken if taken else 0.0
            moving = self.move_seconds(moved * self.share_beyond(taken), width) if moved else 0.0
            return first + moving + self.decode_seconds(rest, width, taken, x)

        actor = self.state.actor
        most = self._most_ranks
        ranks = strategy.world_size if strategy is not None else most
        now, end = first + change, clock(self.end)
        first_trained = actor.mini_batches_done + 1
        for number in range(first_trained, actor.mini_batches + 1):
            now = max(now, clock(self.arrives(number)))
            if number > first_trained and now >= end and ranks < most:
                ranks, now = most, now + self._rates.rescale_seconds
            now += self.batch_seconds(ranks)
        return IterationPlan(seconds=max(now, end), waits=first, strategy=strategy)

    @cached_property
    def _most_ranks(self) -> int:
        actor = self.state.actor
        sizes = [one.world_size for one in actor.strategies]
        return max([n for n in sizes if n <= len(actor.devices)] or [actor.strategy.world_size])

    def waiting(self) -> IterationPlan:
        """The actor, as it is, begins no mini-batch until everything is generated, and takes all
        devices then."""
        return self.lending(None, self.state.actor.mini_batches)

    def best_lending(self, strategies: Sequence[Strategy]) -> IterationPlan:
        """The best of the plans in which the actor lends its devices, for now at least."""
        actor = self.state.actor
        plans = [self.waiting()]
        for number in range(actor.mini_batches_done + 1, actor.mini_batches + 1):
            plans += [self.lending(one, number) for one in strategies if self._leaves_room(one)]
        return min(plans, key=lambda one: one.seconds)

    def _leaves_room(self, strategy: Strategy) -> bool:
        return self.units(strategy.world_size, guests=self.state.phase == "begin") >= 1.0


LEAST_GAIN = 0.02
"""share of the time that is left; a smaller gain is not worth a change"""


class Greedy(IterationPolicy):
    """Chooses the layout, of those that can be had now, with which the iteration ends first.

    Where rates are not known yet, it moves nothing, but that the actor takes its devices again once
    all is generated.

    It predicts with measured `Rates` (see the module): where the actor lends its devices, it
    compares all moments at which they could be taken back, with all strategies, and takes them back
    when the best moment is now. It changes nothing for less than `LEAST_GAIN`. As in `Tail`,
    devices go one way within an iteration: rollout borrows at its beginning, the actor takes back
    and grows.
    """

    def begin(self, state: ClusterState) -> ScalingDecision | None:
        """Lend the actor's devices where that ends the iteration earlier."""
        lent = lend(state) if state.rates.known else None
        if lent is None:
            return None
        forecast = Forecast(state)
        held = forecast.holding(state.actor.strategy).seconds
        plan = forecast.best_lending(at_least_home(state))
        return lent if plan.seconds < held * (1.0 - LEAST_GAIN) else None

    def step(self, state: ClusterState) -> ScalingDecision | None:
        """Return what changes within an iteration; None: nothing."""
        if not state.actor.holds and not state.unfinished:
            return take_most(state)
        if not state.rates.known:
            return None
        if not state.actor.holds:
            return _back(state)
        return _grown(state) if state.actor.ready else _freed(state)


def _back(state: ClusterState) -> ScalingDecision | None:
    """Take the actor's devices back where the best moment for it is now."""
    if not has_work(state):
        return None
    plan = Forecast(state).best_lending(at_least_home(state))
    return take_back(state, plan.strategy) if plan.strategy and plan.waits <= 0.0 else None


def _freed(state: ClusterState) -> ScalingDecision | None:
    """Free devices while the actor trains, if it will grow into them."""
    found = release(state)
    if found is None:
        return None
    forecast = Forecast(state)
    least = _worth_a_change(forecast)
    grows = any(forecast.holding(one).seconds < least for one in larger_strategies(state))
    return found if grows else None


def _grown(state: ClusterState) -> ScalingDecision | None:
    """Grow the actor as far as that ends the iteration earlier, now or once all is generated."""
    if not has_work(state):
        return None
    forecast = Forecast(state)
    best, least = None, _worth_a_change(forecast)
    for one in larger_strategies(state):
        grown = grow_to(state, one, f"{state.unfinished} samples are left to generate")
        seconds = forecast.holding(one).seconds
        if grown is not None and seconds < least:
            best, least = grown, seconds
    if state.unfinished and larger_strategies(state) and forecast.waiting().seconds < least:
        return ScalingDecision(
            iteration=state.iteration,
            actor_waits=True,
            reason=f"the actor waits for {state.unfinished} samples, and grows then",
        )
    return best


def _worth_a_change(forecast: Forecast) -> float:
    """Return the seconds below which another plan is worth a change."""
    return forecast.holding(forecast.state.actor.strategy).seconds * (1.0 - LEAST_GAIN)
