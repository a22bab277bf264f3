"""Settings of the cost models, and how long responses are: distributions that give each sample its
length by its seed. All times are in seconds of the simulated hardware.
"""

from __future__ import annotations

import math
import sys
from statistics import NormalDist
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config.counts import check_bounds

Z99 = 2.3263478740408408
"""the 99th percentile of the standard normal distribution"""
NORMAL = NormalDist()
MASK = (1 << 64) - 1


class LogNormal(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="log_normal"
):
    """Log-normal: ``median x ratio ** (z / 2.326)`` with a standard normal ``z``, cut."""

    median: float = 3500.0
    """median length, in tokens"""
    ratio: float = 8.0
    """99th percentile of lengths over their median"""
    longest: int = 28_000
    """tokens at which generation is cut"""

    def __post_init__(self) -> None:
        check_bounds(self, "median", "longest", least=1)
        if not self.ratio >= 1.0:
            raise ValueError(f"ratio (p99 / median) is {self.ratio}; it must be at least 1")

    def length(self, seed: int) -> int:
        """Return the tokens of the sample with this seed."""
        return self._at(NORMAL.inv_cdf(_uniform(seed)))

    def many(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return ``count`` lengths, sorted."""
        z = np.random.default_rng(seed).standard_normal(count)
        return np.sort(np.clip(self.median * self.ratio ** (z / Z99), 1, self.longest))

    def _at(self, z: float) -> int:
        return max(
            1, min(self.longest, round(self.median * math.exp(math.log(self.ratio) * z / Z99)))
        )


class Empirical(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="empirical"
):
    """Lengths that were measured, drawn with replacement."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError("tokens must hold at least one length, and none below 1")

    @property
    def longest(self) -> int:
        """Longest of the lengths, in tokens."""
        return max(self.tokens)

    def length(self, seed: int) -> int:
        """Return the tokens of the sample with this seed."""
        return self.tokens[int(_uniform(seed) * len(self.tokens))]

    def many(self, count: int, seed: int) -> NDArray[np.float64]:
        """Return ``count`` lengths, sorted."""
        rng = np.random.default_rng(seed)
        return np.sort(rng.choice(np.asarray(self.tokens, np.float64), count))


def _uniform(seed: int) -> float:
    """Return a number between 0 and 1, both excluded, for a seed: SplitMix64 (Steele, Lea, Flood,
    2014). A generator of numpy's takes thirty times as long to make."""
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return ((mixed ^ mixed >> 31) >> 12 | 1) * 2.0**-52


Lengths: TypeAlias = LogNormal | Empirical


class LogNormalSeconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-normal: ``median x ratio ** (z / 2.326)`` with a standard normal ``z``, cut."""

    median: float
    """median, in seconds"""
    ratio: float = 8.0
    """99th percentile over the median"""
    longest: float = 120.0
    """seconds at which it is cut"""

    def __post_init__(self) -> None:
        check_bounds(self, "median", "longest", above=0)
        check_bounds(self, "ratio", least=1)

    def at(self, share: float) -> float:
        """Return the seconds below which this share lies."""
        log_ratio = math.log(self.ratio) * NORMAL.inv_cdf(share) / Z99
        return min(self.longest, self.median * math.exp(log_ratio))


class CostEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that batches continuously.

    One step makes one token for each running sequence and takes ``(decode_seconds + running *
    sequence_seconds) / width ** wider``.
    """

    decode_seconds: float
    """seconds of a step for reading the weights"""
    sequence_seconds: float
    """seconds that each running sequence adds to a step, for reading its cache"""
    prefill_seconds: float
    """seconds for one token of a prompt, or of a partial response that is continued elsewhere"""
    load_seconds: float = 0.0
    """seconds of taking new weights"""
    move_seconds: float = 0.0
    """seconds of offloading, and of onloading"""
    wider: float = 0.6
    """exponent of the speed by width: 1 if twice the devices were twice as fast"""
    slots: int = 128
    """sequences that run at a time; more wait, by priority"""
    lengths: Lengths = LogNormal()

    def __post_init__(self) -> None:
        seconds = ("sequence_seconds", "prefill_seconds", "load_seconds", "move_seconds")
        check_bounds(self, *seconds, "wider", least=0)
        check_bounds(self, "decode_seconds", above=0)
        check_bounds(self, "slots", least=1)


class CostTrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer whose ranks share each mini-batch by its tokens."""

    token_seconds: float
    """seconds of forward and backward pass of one token, and its log-probs, on one device"""
    sample_seconds: float = 0.0
    """seconds that each sample adds to those of its tokens: what a micro-batch takes, however many
    tokens it has, shared out over its samples"""
    beside_generation: float = 1.0
    """factor of ``token_seconds`` and ``sample_seconds`` while rollout instances generate, where
    they and the actor compute on the same cores"""
    step_seconds: float = 0.0
    """seconds of an optimizer step"""
    rescale_seconds: float = 0.0
    """seconds of a change of the strategy"""
    move_seconds: float = 0.0
    """seconds of offloading, and of onloading"""
    publish_seconds: float = 0.0
    """seconds of gathering the weights of a version"""

    def __post_init__(self) -> None:
        seconds = ("step_seconds", "rescale_seconds", "move_seconds", "publish_seconds")
        check_bounds(self, *seconds, "sample_seconds", least=0)
        check_bounds(self, "beside_generation", least=1)
        check_bounds(self, "token_seconds", above=0)


class InferenceCostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that compute log-probs of whole samples before they are trained, on own devices."""

    devices: int = 0
    """devices of the cluster that neither rollout nor actor ever has; 0: the actor computes
    log-probs itself, within ``actor.token_seconds``"""
    token_seconds: float = 0.0
    """seconds for one token, on one device"""
    batch: int = 64
    """samples that are computed together at most"""

    def __post_init__(self) -> None:
        check_bounds(self, "devices", "token_seconds", least=0)
        check_bounds(self, "batch", least=1)
        if bool(self.devices) != bool(self.token_seconds):
            raise ValueError(
                f"devices is {self.devices} and token_seconds {self.token_seconds}: set both, or "
                "neither"
            )


class EnvCostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps of an environment for each sample, after its tokens: tools, tests, simulators. They
    need no devices."""

    steps: int = 0
    """steps of each sample"""
    step_seconds: float = 0.0
    workers: int = 0
    """samples whose steps run at a time; 0: all"""

    def __post_init__(self) -> None:
        check_bounds(self, "steps", "step_seconds", "workers", least=0)

    @property
    def seconds(self) -> float:
        """Seconds of all steps of a sample."""
        return self.steps * self.step_seconds


class EpisodeCostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Episodes in place of single answers. ``generation.lengths`` are those of an answer then."""

    turns: tuple[int, ...] = ()
    """turns that an episode would make; each episode draws one of them. Empty: each sample is one
    answer"""
    tool_seconds: tuple[float, ...] | LogNormalSeconds = (0.0,)
    """seconds from an answer to the next turn: tools, or whatever the agent waits for. Each wait
    draws one of them, or from a distribution"""
    given_tokens: int = 0
    """tokens that the model is given between two answers: results of tools, text of the template"""
    max_turns: int = 8
    """most turns of an episode"""
    max_tokens: int = sys.maxsize
    """most tokens of an episode, its prompt and what it is given included"""
    concurrent: int = 256
    """episodes that a worker has open at a time"""
    workers: int = 1
    """episode workers; they need no devices"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_turns", "concurrent", "workers", least=1)
        check_bounds(self, "max_tokens", least=2)
        check_bounds(self, "given_tokens", least=0)
        if any(one < 1 for one in self.turns):
            raise ValueError(f"turns has {min(self.turns)}; an episode has at least 1 turn")
        seconds = self.tool_seconds
        if isinstance(seconds, LogNormalSeconds):
            return
        if not seconds or not all(0.0 <= one < math.inf for one in seconds):
            raise ValueError(
                f"tool_seconds is {list(seconds)}; it must hold at least one number of seconds, "
                "and none below 0"
            )

    @property
    def mean_turns(self) -> float:
        """Mean turns of an episode; 1 where each sample is one answer."""
        return float(np.minimum(self.turns, self.max_turns).mean()) if self.turns else 1.0

    def turns_of(self, seed: int) -> int:
        """Return the turns that the episode with this seed would make."""
        return self.turns[int(_uniform(seed) * len(self.turns))]

    def seconds_of(self, seed: int, turn: int) -> float:
        """Return the seconds before turn ``turn``, from 1 on, of the episode with this seed."""
        share = _uniform(seed + (turn << 40))
        seconds = self.tool_seconds
        if isinstance(seconds, LogNormalSeconds):
            return seconds.at(share)
        return seconds[int(share * len(seconds))]
