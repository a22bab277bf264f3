"""Plain data of benches: cases and the peers they need, what was measured, bars and verdicts."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec


class Absence(enum.Enum):
    """Reason why a case has no samples."""

    NOT_ASKED = "needs --peers"
    """The peer was not asked for: its bars are not measured."""
    MISSING = "peer missing"
    """The peer could not be installed: its bars fell short."""
    SKIPPED = "skipped"
    """The case cannot run on this machine: its bars are not measured."""
    FAILED = "failed"
    """The command failed or printed no measurement: its bars fell short."""


@dataclasses.dataclass(frozen=True)
class Gap:
    """A case without samples."""

    absence: Absence
    detail: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.absence.value, self.detail) if part)


Sample = dict[str, float]
"""One run of one case: ``{"steps_per_second": 8287.0}``."""


@dataclasses.dataclass
class Results:
    """The samples of each case, in the order in which they were taken."""

    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)
    gaps: dict[str, Gap] = dataclasses.field(default_factory=dict)

    def add(self, case: str, sample: Sample) -> None:
        """Record one run of a case."""
        self.samples.setdefault(case, []).append(sample)

    def drop(self, case: str, gap: Gap) -> None:
        """Record why a case has no samples; those that it has are dropped."""
        self.samples.pop(case, None)
        self.gaps[case] = gap

    def values(self, case: str, metric: str) -> list[float]:
        """One metric of every run of a case; KeyError names a metric that a run did not print."""
        found = []
        for sample in self.samples[case]:
            if metric not in sample:
                raise KeyError(f"{case} printed no {metric!r}, only {', '.join(sorted(sample))}")
            found.append(sample[metric])
        return found

    def median(self, case: str, metric: str) -> float:
        """The median of one metric over the runs of a case."""
        return statistics.median(self.values(case, metric))

    def metrics(self, case: str) -> list[str]:
        """The metrics that every run of a case printed."""
        runs = self.samples[case]
        return [name for name in runs[0] if all(name in run for run in runs)]


@dataclasses.dataclass(frozen=True)
class PeerSoftware:
    """Other software, in a virtualenv of its own with our version of Python."""

    name: str
    requirements: tuple[tuple[str, ...], ...]
    """Pinned, in stages that are installed one after the other (torch before what needs it)."""

    @property
    def pins(self) -> tuple[str, ...]:
        """All requirements, in order."""
        return tuple(pin for stage in self.requirements for pin in stage)


@dataclasses.dataclass(frozen=True)
class CommandOutput:
    """The output of a case's command."""

    stdout: str
    out: pathlib.Path
    """The empty folder that the command was given as ``{out}``."""


def printed_json(outcome: CommandOutput) -> Sample:
    """Return the sample that a command printed: its last line, a JSON object of numbers."""
    lines = outcome.stdout.strip().splitlines()
    return sample_of(json.loads(lines[-1] if lines else ""))


def sample_of(measured: object) -> Sample:
    """The numbers of a JSON object; ValueError where it is no object or holds none."""
    if not isinstance(measured, dict):
        raise ValueError(f"expected a JSON object, found {measured!r}")
    numbers = {
        str(name): float(value)
        for name, value in measured.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if not numbers:
        raise ValueError(f"no numbers in {measured!r}")
    return numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """One command to measure."""

    name: str
    command: tuple[str, ...]
    """Command line. May hold ``{python}`` (ours, or the peer's), ``{here}`` (the bench's folder),
    ``{out}`` (an empty folder) and ``{repetition}`` (0, 1, 2, ...: a seed)."""
    peer: PeerSoftware | None = None
    """Peer in whose virtualenv the command runs; None: ours."""
    requires: tuple[str, ...] = ()
    """Modules that our own interpreter must have for it."""
    cores: int = 1
    """How many cores it is pinned to."""
    threads: int | None = 1
    """``OMP_NUM_THREADS``; None leaves it unset."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0
    """seconds for one run"""
    read: Callable[[CommandOutput], Sample] = printed_json


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target for a measurement: a bound on a median, or on a quotient of medians."""

    name: str
    cases: tuple[str, ...]
    """The cases that it is measured from."""
    value: Callable[[Results], float]
    target: Callable[[Results], float]
    unit: str = ""
    at_most: bool = False
    """The target is an upper bound."""

    def held(self, value: float, target: float) -> bool:
        """Whether the value reaches the target (NaN never does)."""
        return value <= target if self.at_most else value >= target


@dataclasses.dataclass(frozen=True)
class Bench:
    """Cases that run alternating, and the bars they are held against."""

    name: str
    summary: str
    """One line for ``--list``."""
    cases: tuple[Case, ...]
    bars: tuple[Bar, ...]
    repetitions: int = 5
    notes: tuple[str, ...] = ()
    """What a reader of the table must know, printed below it."""


def selected(bench: Bench, parts: Sequence[str]) -> Bench:
    """The bench with only those cases whose name contains one of ``parts``, and their bars.

    Raises:
        ValueError: a part is in no case's name.
    """
    names = [case.name for case in bench.cases]
    for part in parts:
        if not any(_holds(name, part) for name in names):
            raise ValueError(f"no case of {bench.name!r} has {part!r} in its name: {names}")
    cases = tuple(one for one in bench.cases if any(_holds(one.name, part) for part in parts))
    kept = {case.name for case in cases}
    bars = tuple(bar for bar in bench.bars if kept.issuperset(bar.cases))
    return dataclasses.replace(bench, cases=cases, bars=bars)


def _holds(name: str, part: str) -> bool:
    return part.casefold() in name.casefold()


Metric = tuple[str, str]
"""A case's name and the name of a number that it prints."""

HELD = "held"
FELL_SHORT = "fell short"
NOT_MEASURED = "not measured"


class BarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one bar."""

    bar: str
    outcome: str
    """``held``, ``fell short`` or ``not measured``"""
    value: float | None = None
    target: float | None = None
    unit: str = ""
    at_most: bool = False
    reason: str = ""
    """Why there is no value."""


def ratio(name: str, *, metric: str, ours: str, theirs: str, at_least: float) -> Bar:
    """Return the bar "our median is at least ``at_least`` times theirs"."""
    return quotient(name, (ours, metric), (theirs, metric), at_least=at_least)


def quotient(
    name: str,
    over: Metric,
    under: Metric,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Bar:
    """The bar on one median by another. Exactly one of the two targets is given.

    Raises:
        ValueError: neither is given, or both are.
    """
    target = _the_one(name, at_least, at_most)
    return Bar(
        name=name,
        cases=tuple(dict.fromkeys((over[0], under[0]))),
        value=lambda results: results.median(*over) / results.median(*under),
        target=lambda _: target,
        unit="x",
        at_most=at_most is not None,
    )


def best_of(name: str, *, metric: str, ours: str, theirs: Sequence[str], at_least: float) -> Bar:
    """Return the bar "our median is at least ``at_least`` times the best of theirs"."""

    def value(results: Results) -> float:
        return results.median(ours, metric) / max(results.median(one, metric) for one in theirs)

    return Bar(name=name, cases=(ours, *theirs), value=value, target=lambda _: at_least, unit="x")


def bound(
    name: str,
    metric: Metric,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "",
) -> Bar:
    """The bar on one median by itself. Exactly one of the two targets is given.

    Raises:
        ValueError: neither is given, or both are.
    """
    target = _the_one(name, at_least, at_most)
    return Bar(
        name=name,
        cases=(metric[0],),
        value=lambda results: results.median(*metric),
        target=lambda _: target,
        unit=unit,
        at_most=at_most is not None,
    )


def _the_one(name: str, at_least: float | None, at_most: float | None) -> float:
    given = [target for target in (at_least, at_most) if target is not None]
    if len(given) != 1:
        raise ValueError(f"bar {name!r}: give at_least or at_most, not both")
    return given[0]


def judge(bar: Bar, results: Results) -> BarVerdict:
    """The verdict on a bar. A case that should have run and did not makes it fall short."""
    gaps = [(case, results.gaps[case]) for case in bar.cases if case in results.gaps]
    harmless = (Absence.NOT_ASKED, Absence.SKIPPED)
    broken = [(case, gap) for case, gap in gaps if gap.absence not in harmless]
    if broken:
        return _without_value(bar, FELL_SHORT, broken[0])
    if gaps:
        return _without_value(bar, NOT_MEASURED, gaps[0])
    try:
        value, target = bar.value(results), bar.target(results)
    except (KeyError, ZeroDivisionError) as error:
        return BarVerdict(bar=bar.name, outcome=FELL_SHORT, reason=str(error))
    return BarVerdict(
        bar=bar.name,
        outcome=HELD if bar.held(value, target) else FELL_SHORT,
        value=value,
        target=target,
        unit=bar.unit,
        at_most=bar.at_most,
    )


def _without_value(bar: Bar, outcome: str, gap: tuple[str, object]) -> BarVerdict:
    case, why = gap
    return BarVerdict(bar=bar.name, outcome=outcome, reason=f"{case}: {why}")
