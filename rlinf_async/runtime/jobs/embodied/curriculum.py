"""A curriculum that follows the success rate: levels of ``options``, with which episodes begin.

::

    tickets --level, its options--> env worker ---> ``reset(options=...)`` of each new episode
       ^                                                   |
       |    enough of the level's last episodes succeed    v
    `Climb.after` <------------------------- each episode, with the level in which it began

Only episodes of the present level count: those that began before, or come from tickets that were
under way, are of another. What was counted is part of the run's progress, so a run that is killed
goes on counting from its checkpoint. Evaluations, pictures and demonstrations are of the last
level, whose options stand in ``env.options`` by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_between, check_bounds
from rlinf_async.messages.embodied import Level
from rlinf_async.workers.env.config import EnvConfig

LEVEL_SUCCESS: Final = "level_success_rate"
"""column of the metrics"""


class CurriculumConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Levels, from the easiest to what is to be learnt, and when the next one begins."""

    levels: tuple[dict[str, Any], ...] = ()
    """options of ``reset`` in each level; none: there is no curriculum"""
    success_rate: float = 0.8
    """share of successes at which the next level begins"""
    episodes: int = 50
    """newest episodes of the level of which that is the share: all have to be there"""

    def __post_init__(self) -> None:
        check_between(self, "success_rate")
        check_bounds(self, "episodes", least=1)


class Climb(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come."""

    wanted: CurriculumConfig = CurriculumConfig()
    level: int = 0
    successes: tuple[bool, ...] = ()
    """of the level's newest episodes, at most ``wanted.episodes``"""

    def under(self, wanted: CurriculumConfig) -> Climb:
        """What is left of it under this curriculum: nothing, where that is another one."""
        return self if self.wanted == wanted else Climb(wanted=wanted)

    def after(self, levels: Sequence[int], successes: Sequence[bool | None]) -> Climb:
        """How far it has come with these episodes, in their order; of one that says nothing of its
        success it was none."""
        level, kept = self.level, self.successes
        last, wanted = len(self.wanted.levels) - 1, self.wanted
        for of, success in zip(levels, successes, strict=True) if last > 0 else ():
            if of != level:
                continue
            kept = (*kept, success is True)[-wanted.episodes :]
            enough = len(kept) == wanted.episodes and sum(kept) >= wanted.success_rate * len(kept)
            if enough and level < last:
                level, kept = level + 1, ()
        return Climb(wanted=wanted, level=level, successes=kept)

    @property
    def complete(self) -> bool:
        """Whether it is at the last level, and enough episodes of that have ended."""
        last = self.level >= len(self.wanted.levels) - 1
        return last and len(self.successes) == self.wanted.episodes

    @property
    def ticket(self) -> Level | None:
        """What episodes begin with; None: there is no curriculum."""
        levels = self.wanted.levels
        return Level(self.level, levels[self.level]) if levels else None

    def columns(self) -> dict[str, float]:
        """Columns of the metrics: after the iteration, as the next ticket is issued."""
        if not self.wanted.levels:
            return {}
        columns = {"level": float(self.level), "level_episodes": float(len(self.successes))}
        if self.successes:
            columns[LEVEL_SUCCESS] = sum(self.successes) / len(self.successes)
        return columns


def columns_of(wanted: CurriculumConfig) -> tuple[str, ...]:
    """Return the columns of the metrics."""
    return (*Climb(wanted=wanted, successes=(True,)).columns(),)


def at_last(env: EnvConfig, wanted: CurriculumConfig) -> EnvConfig:
    """Return the environments of the last level."""
    return msgspec.structs.replace(env, options=wanted.levels[-1]) if wanted.levels else env


def check_curriculum(env: EnvConfig, wanted: CurriculumConfig) -> None:
    """Raise `ConfigError` for a curriculum that would have no effect."""
    default = CurriculumConfig()
    if not wanted.levels:
        for setting in ("success_rate", "episodes"):
            if getattr(wanted, setting) != getattr(default, setting):
                raise ConfigError(
                    f"{getattr(wanted, setting)} was given, but there are no levels: set "
                    "curriculum.levels, or leave it out",
                    path=("curriculum", setting),
                )
        return
    if len(wanted.levels) == 1:
        raise ConfigError(
            "there is one level, so none follows: give more, or its options as env.options",
            path=("curriculum", "levels"),
        )
    if env.options:
        raise ConfigError(
            f"{env.options} would have no effect, since each level has its own: leave it out",
            path=("env", "options"),
        )
    if env.many_in_a_call:
        raise ConfigError(
            f"simulator = {env.simulator!r} begins episodes by itself, and is told no options: "
            "leave the levels out, or use simulator = 'single' or 'pool'",
            path=("curriculum", "levels"),
        )
