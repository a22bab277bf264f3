"""Scaling policies: pure functions of a `ClusterState`, by name.

Packages add names by the entry point group ``rlinf_async.scaling_policies``; a setting may also
name a class as ``"module:Class"`` or ``"file.py:Class"``. A policy keeps no memory of its own: what
it has to know of the past is in the state, so a scheduler that was restarted goes on with it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import Registry
from rlinf_async.scheduling.state import ClusterState, ScalingDecision, check

log = logging.getLogger(__name__)

GROUP = "rlinf_async.scaling_policies"


class ScalingPolicy(Protocol):
    """Decides who gets which devices.

    One that orders requests has an attribute ``orders = True``: it is then told of those that wait,
    one by one, which costs a lease of the queue.
    """

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return what changes now. Pure: the same state gives the same decision."""
        ...


scaling_policies: Registry[Callable[[], ScalingPolicy]] = Registry(
    "scaling policy", group=GROUP, called_with=()
)
POLICIES = scaling_policies.paths
POLICIES |= {
    "static": "rlinf_async.scheduling.policies.simple:Static",
    "turns": "rlinf_async.scheduling.policies.simple:Turns",
    "tail": "rlinf_async.scheduling.policies.simple:Tail",
    "greedy": "rlinf_async.scheduling.policies.greedy:Greedy",
    "longest_first": "rlinf_async.scheduling.policies.longest_first:LongestFirst",
}
"""name -> ``module:class``"""


def load_policy(name: str, path: tuple[str, ...] = ()) -> ScalingPolicy:
    """Return the policy of this name; ``path`` is the setting, for the error.

    Raises `ConfigError`, which lists those there are.
    """
    made = scaling_policies.check(name, path)()
    if not callable(getattr(made, "decide", None)):
        raise ConfigError(f"policy {name!r} has no method decide(state)", path=path)
    return made


class SafePolicy:
    """A policy that is replaced by `Static` once it has raised, or has returned what cannot be
    carried out: everybody goes home, and the run goes on.

    Args:
        policy: is asked.
        name: name of the policy, in the log.
        report: gets the message, once; by default it is logged as a warning.
    """

    def __init__(
        self, policy: ScalingPolicy, name: str, report: Callable[[str], None] | None = None
    ) -> None:
        self._policy = policy
        self._name = name
        self._report = report or log.warning
        self.orders: bool = getattr(policy, "orders", False)
        """whether it orders requests that wait, and has to know them one by one"""
        self.fault = ""
        """reason why the policy is not asked any more"""

    def decide(self, state: ClusterState, /) -> ScalingDecision:
        """Return the policy's decision if it can be carried out; see the class."""
        if not self.fault:
            try:
                decision = self._policy.decide(state)
                if not isinstance(decision, ScalingDecision):
                    raise TypeError(f"it returned {decision!r}, not a ScalingDecision")
                # Its fields may be of any type: Python does not look.
                order, rest = decision.order, msgspec.structs.replace(decision, order=())
                rest = msgspec.convert(msgspec.to_builtins(rest), ScalingDecision)
                decision = msgspec.structs.replace(rest, order=tuple(order))  # of many requests
                check(decision, state)
                return decision
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
                self._report(
                    f"policy {self._name!r} failed in iteration {state.iteration} ({self.fault}); "
                    "everybody goes home and stays there (policy 'static')"
                )
                self._policy = load_policy("static")
                self.orders = False
        return self._policy.decide(state)


def safe(
    policy: ScalingPolicy, name: str = "", report: Callable[[str], None] | None = None
) -> SafePolicy:
    """Return a policy that is `Static` once this one fails, and says so once."""
    return SafePolicy(policy, name or type(policy).__name__, report)


class Predictor:
    """Expected tokens that are still to come, by the tokens so far: of the lengths that are longer
    than that, their mean.

    Args:
        lengths: lengths of samples of the past.
    """

    def __init__(self, lengths: Collection[float] | NDArray[np.float64]) -> None:
        ordered = np.sort(np.fromiter(lengths, np.float64))
        above = np.cumsum(ordered[::-1])[::-1]
        # As lists: for one number at a time they are faster than arrays.
        self._means: list[float] = (above / np.arange(len(ordered), 0, -1)).tolist()
        self._ordered: list[float] = ordered.tolist()

    @property
    def longest(self) -> float:
        """Longest of the known lengths, in tokens."""
        return self._ordered[-1]

    @property
    def mean(self) -> float:
        """Mean of the known lengths, in tokens."""
        return self._means[0]

    def left(self, made: int) -> float:
        """Return the expectation for one sample."""
        at = bisect_right(self._ordered, made)
        if at >= len(self._ordered):
            return max(1.0, 0.05 * made)
        return self._means[at] - made
