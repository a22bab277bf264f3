"""Parallel strategies: the sizes of each kind of parallelism, and the numbers of the ranks.

Ranks are numbered as Megatron's default order ``tp-cp-ep-dp-pp`` does: tensor-parallel neighbours
are next to each other, pipeline stages farthest apart. For experts the same ranks form a
grid of their own::

    dense      rank = tp + TP x (cp + CP x (dp + DP x stage))
    experts    rank = etp + ETP x (ep + EP x (edp + EDP x stage)),   ETP x EP x EDP = TP x CP x DP

Context-parallel ranks hold the same parameters, so data-sharding spreads over ``DP x CP`` ranks.
"""

from __future__ import annotations

import msgspec

from rlinf_async.parallel.errors import UNEVEN, StrategyError, nearest_divisors
from rlinf_async.parallel.sharding import Replicated, Sharding


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is spread over ``world_size`` ranks. Raises `StrategyError` for invalid sizes."""

    dp: int = 1
    """data-parallel size: ranks that train on different samples"""
    tp: int = 1
    """tensor-parallel size"""
    pp: int = 1
    """pipeline stages"""
    cp: int = 1
    """context-parallel size"""
    ep: int = 1
    """expert-parallel size, taken from the ranks of ``tp x cp x dp``"""
    expert_tp: int | None = None
    """tensor-parallel size inside an expert; that of the rest by default"""
    sharding: Sharding = Replicated()
    """sharding of a parameter over data- and context-parallel ranks"""
    stage_layers: tuple[int, ...] | None = None
    """layers of each model chunk, first to last; equal by default"""
    virtual_stages: int = 1
    """model chunks of each stage (interleaved schedule): chunk c is on stage ``c % pp``"""

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value} must be at least 1"
            for name in ("dp", "tp", "pp", "cp", "ep", "virtual_stages")
            if (value := getattr(self, name)) < 1
        ]
        if self.expert_tp is not None and self.expert_tp < 1:
            faults.append(f"expert_tp={self.expert_tp} must be at least 1")
        if not faults and self.data_ranks % self.sharding.replicas:
            faults.append(
                f"sharding.replicas={self.sharding.replicas} does not divide dp x cp = "
                f"{self.data_ranks}; nearest that does: "
                f"{nearest_divisors(self.sharding.replicas, self.data_ranks)}"
            )
        if not faults and (self.tp * self.data_ranks) % (self.expert_size * self.ep):
            fitting = self.tp * self.data_ranks // self.expert_size
            faults.append(
                f"ep={self.ep} x expert_tp={self.expert_size} does not divide tp x cp x dp = "
                f"{self.tp * self.data_ranks}"
                + (f"; nearest ep: {nearest_divisors(self.ep, fitting)}" if fitting else "")
            )
        if faults:
            raise StrategyError(faults)

    @property
    def sizes(self) -> str:
        """The sizes as text: ``"tp=2 x dp=4"``; those of 1 are left out, but for dp."""
        names = ("tp", "pp", "cp", "ep", "virtual_stages")
        above = [f"{one}={getattr(self, one)}" for one in names if getattr(self, one) > 1]
        return " x ".join([*above, f"dp={self.dp}"])

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """The number of ranks that hold the same dense slice before sharding."""
        return self.dp * self.cp

    @property
    def expert_size(self) -> int:
        """The tensor-parallel size inside an expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_data_ranks(self) -> int:
        """The number of ranks that hold the same slice of the same expert before sharding."""
        return self.tp * self.data_ranks // (self.expert_size * self.ep)

    def dense_ranks(self, stage: int, tp_rank: int) -> range:
        """Return the ranks that share one dense slice, in data-parallel order."""
        first = tp_rank + self.tp * self.data_ranks * stage
        return range(first, first + self.tp * self.data_ranks, self.tp)

    def expert_ranks(self, stage: int, tp_rank: int, ep_rank: int) -> range:
        """Return the ranks that share one slice of their experts, in expert-data-parallel order."""
        step = self.expert_size * self.ep
        first = tp_rank + self.expert_size * ep_rank + step * self.expert_data_ranks * stage
        return range(first, first + step * self.expert_data_ranks, step)

    def layer_faults(self, layers: int) -> list[str]:
        """Return why ``layers`` layers cannot be put on the stages, one line each."""
        chunks = self.pp * self.virtual_stages
        if self.stage_layers is not None:
            if len(self.stage_layers) != chunks or sum(self.stage_layers) != layers:
                given = f"{sum(self.stage_layers)} layers on {len(self.stage_layers)} chunks"
                return [
                    f"stage_layers={list(self.stage_layers)} is {given}, not {layers} on {chunks}"
                ]
            return ["stage_layers has a negative count"] if min(self.stage_layers) < 0 else []
        if layers % chunks == 0:
            return []
        name = f"pp={self.pp}" + (
            f" x virtual_stages={self.virtual_stages}" if chunks > self.pp else ""
        )
        fault = (
            f"{name} does not divide {layers} layers; nearest: {nearest_divisors(chunks, layers)}"
        )
        if chunks > layers:
            return [fault]
        return [f"{fault}{UNEVEN}{list(even_layers(layers, chunks))}"]

    def stage_of_layers(self, layers: int) -> list[int]:
        """Return the pipeline stage of each layer. Raises `StrategyError`."""
        faults = self.layer_faults(layers)
        if faults:
            raise StrategyError(faults)
        counts = self.stage_layers or even_layers(layers, self.pp * self.virtual_stages)
        return [chunk % self.pp for chunk, count in enumerate(counts) for _ in range(count)]


def even_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Spread layers over chunks; a remainder goes to the middle, away from the embeddings."""
    counts = [layers // chunks] * chunks
    middle = sorted(range(chunks), key=lambda chunk: (abs(2 * chunk - (chunks - 1)), chunk))
    for chunk in middle[: layers % chunks]:
        counts[chunk] += 1
    return tuple(counts)


def valid_dp_sizes(mini_batch: int, *, group_size: int = 1, at_most: int) -> list[int]:
    """Return the data-parallel sizes up to ``at_most`` that can share a mini-batch of whole groups.

    ``mini_batch`` is in samples; ``dp x group_size`` must divide it.
    """
    return [dp for dp in range(1, at_most + 1) if mini_batch % (dp * group_size) == 0]


def check_batch(mini_batch: int, dp: int, *, group_size: int = 1) -> None:
    """Raise `StrategyError`, naming the nearest sizes, unless ``dp`` ranks can share the
    mini-batch."""
    if mini_batch % (dp * group_size) == 0:
        return
    if mini_batch % group_size:
        nearest = "no dp does: the groups are not whole"
    else:
        nearest = f"nearest that does: {nearest_divisors(dp, mini_batch // group_size)}"
    fault = (
        f"dp={dp} x group_size={group_size} does not divide a mini-batch of {mini_batch} samples"
    )
    raise StrategyError([f"{fault}; {nearest}"])
