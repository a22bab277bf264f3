"""What the metrics of a run decide while it trains: where training ends before its last iteration,
``[training.stop_at]``, and which of its checkpoints is the best, ``[training.keep_best]``.

::

    row of an iteration --judge--> reached? the run goes on as after its last iteration
                        --rank---> a checkpoint is due: better than the best so far? it is the best

What was counted and found so far is part of `RunProgress`, so it is in ``latest.json`` and in every
checkpoint: a run that is killed goes on counting from its checkpoint, and judges the iterations
after it anew. Under another setting it begins anew.

A row that lacks the column says nothing: it neither counts nor ends the count. NaN is no better
than anything, and reaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_bounds
from rlinf_async.config.registry import nearest

BEST: Final = "best"
"""name under which commands and settings ask for the best checkpoint"""


class StopAtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The target at which training ends, before its last iteration."""

    metric: str = ""
    """column of ``metrics.csv``; empty: training ends with its last iteration"""
    least: float | None = None
    """reached where the column is at least this"""
    most: float | None = None
    """reached where the column is at most this"""
    times: int = 1
    """iterations in a row that have to reach it"""

    def __post_init__(self) -> None:
        check_bounds(self, "times", least=1)
        limits = {"least": self.least, "most": self.most}
        given = {name: one for name, one in limits.items() if one is not None}
        if not self.metric:
            unused = [*given, *(["times"] if self.times > 1 else [])]
            if unused:
                raise ConfigError(
                    f"{getattr(self, unused[0])} was given, but no column that is to reach it: set "
                    "training.stop_at.metric, or leave it out",
                    path=(unused[0],),
                )
            return
        if len(given) != 1:
            have = "both were given" if given else "neither was given"
            raise ConfigError(
                f"{self.metric!r} has to be at least or at most a number, and {have}: set one of "
                "least and most",
                path=("metric",),
            )
        for name, one in given.items():
            if not math.isfinite(one):
                raise ConfigError(f"{one} is no finite number", path=(name,))

    def reached_by(self, value: float) -> bool:
        """Whether this value reaches the target."""
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most

    def __str__(self) -> str:
        limit = f"least {self.least:g}" if self.least is not None else f"most {self.most:g}"
        return f"{self.metric} at {limit}"


class KeepBestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that is kept beside the newest ones, because it is the best."""

    metric: str = ""
    """column of ``metrics.csv``; empty: only the newest checkpoints are kept"""
    lowest: bool = False
    """whether the lowest value is the best, not the highest"""

    def __post_init__(self) -> None:
        if self.lowest and not self.metric:
            raise ConfigError(
                "true was given, but no column of which the lowest value is the best: set "
                "training.keep_best.metric, or leave it out",
                path=("lowest",),
            )


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How near training is to its target."""

    target: StopAtConfig = StopAtConfig()
    times: int = 0
    """iterations in a row, up to now, that have reached it"""
    why: str = ""
    """why training has ended; empty: it has not"""

    def under(self, target: StopAtConfig) -> Reached:
        """What is left of it under this target: nothing, where that is another one."""
        return self if self.target == target else Reached(target=target)

    def judge(self, iteration: int, row: Mapping[str, float]) -> Reached:
        """How near it is with the row of one more iteration."""
        target, value = self.target, row.get(self.target.metric)
        if value is None or self.why:
            return self
        times = self.times + 1 if target.reached_by(value) else 0
        why = ""
        if times >= target.times:
            again = f", {times} times in a row" if times > 1 else ""
            why = f"{target} was reached in iteration {iteration}{again}: {value:.6g}"
        return Reached(target=target, times=times, why=why)

    @property
    def shown(self) -> str:
        """How near it is, for people."""
        return self.why or f"{self.target}, {self.times} of {self.target.times} times in a row"


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The best checkpoint so far."""

    wanted: KeepBestConfig = KeepBestConfig()
    checkpoint: str = ""
    """name of its folder; empty: there is none yet"""
    value: float = 0.0

    def under(self, wanted: KeepBestConfig) -> Best:
        """What is left of it where this is asked for."""
        return self if self.wanted == wanted else Best(wanted=wanted)

    def rank(self, checkpoint: str, row: Mapping[str, float]) -> Best:
        """The best one where this checkpoint, of the version of this row, is written too; of equal
        ones it is the earlier."""
        value = row.get(self.wanted.metric)
        if value is None or math.isnan(value):
            return self
        better = value < self.value if self.wanted.lowest else value > self.value
        if self.checkpoint and not better:
            return self
        return Best(wanted=self.wanted, checkpoint=checkpoint, value=value)


def check_targets(
    stop_at: StopAtConfig,
    keep_best: KeepBestConfig,
    columns: Collection[str],
    *,
    elsewhere: Mapping[str, str],
    iterations: int,
    checkpoint_every: int,
) -> None:
    """Raise `ConfigError` for a target or a best that could never be.

    Args:
        stop_at: the target.
        keep_best: what the best is.
        columns: columns that the rows of iterations have, at some time.
        elsewhere: columns that only other rows have, and what to take in their place.
        iterations: iterations of the whole run.
        checkpoint_every: iterations between two checkpoints; 0: only the last is written.
    """
    asked = (("stop_at", stop_at.metric), ("keep_best", keep_best.metric))
    for section, metric in asked:
        if metric and metric not in columns:
            raise ConfigError(
                _unknown(metric, columns, elsewhere), path=("training", section, "metric")
            )
    if stop_at.metric and stop_at.times > iterations:
        raise ConfigError(
            f"{stop_at.times} times in a row are never reached by a run of {iterations} "
            f"iterations: take at most {iterations}",
            path=("training", "stop_at", "times"),
        )
    if keep_best.metric and not checkpoint_every:
        raise ConfigError(
            f"{keep_best.metric!r} would choose among checkpoints, and with "
            "training.checkpoint_every = 0 only the last is written: set that, or leave it out",
            path=("training", "keep_best", "metric"),
        )


def _unknown(metric: str, columns: Collection[str], elsewhere: Mapping[str, str]) -> str:
    if metric in elsewhere:
        return f"{metric!r} {elsewhere[metric]}"
    hint = nearest(metric, columns)
    return f"no iteration writes a column {metric!r}{hint}; columns: {', '.join(sorted(columns))}"
