"""`Greedy`: of the layouts that can be had now, the one with which the iteration ends first.

It predicts with measured `Rates` (see `forecast`): where the actor lends its devices, it compares
all moments at which they could be taken back, with all strategies, and takes them back when the
best moment is now. It changes nothing for less than `LEAST_GAIN`. As in `Tail`, devices go one way
within an iteration: rollout borrows at its beginning, the actor takes back and grows.
"""

from __future__ import annotations

from rlinf_async.scheduling.decision import ScalingDecision
from rlinf_async.scheduling.policies.forecast import Forecast
from rlinf_async.scheduling.policies.growing import (
    at_least_home,
    grow_to,
    has_work,
    larger_strategies,
    lend,
    release,
    spread,
    take_back,
    take_most,
)
from rlinf_async.scheduling.policies.home import all_serve, go_home
from rlinf_async.scheduling.state import ClusterState

LEAST_GAIN = 0.02
"""share of the time that is left; a smaller gain is not worth a change"""


class Greedy:
    """See the module. Where rates are not known yet, it moves nothing, but that the actor takes its
    devices again once all is generated."""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now."""
        nothing = ScalingDecision(iteration=state.iteration)
        if state.phase == "end":
            return go_home(state)
        if state.phase == "begin":
            return spread(all_serve(_begin(state) or nothing, state), state)
        if not state.actor.holds and not state.unfinished:
            return take_most(state) or nothing
        if not state.rates.known:
            return nothing
        if not state.actor.holds:
            return _back(state) or nothing
        return (_grown(state) if state.actor.ready else _freed(state)) or nothing


def _begin(state: ClusterState) -> ScalingDecision | None:
    """Lend the actor's devices where that ends the iteration earlier."""
    lent = lend(state) if state.rates.known else None
    if lent is None:
        return None
    forecast = Forecast(state)
    held = forecast.holding(state.actor.strategy).seconds
    plan = forecast.best_lending(at_least_home(state))
    return lent if plan.seconds < held * (1.0 - LEAST_GAIN) else None


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
