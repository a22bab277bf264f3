"""A bench: cases, the peers they need, and bars."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rlinf_async.bench.results import Results, Sample


@dataclasses.dataclass(frozen=True)
class Peer:
    """Other software, in a virtualenv of its own with our version of Python."""

    name: str
    requirements: tuple[tuple[str, ...], ...]
    """Pinned, in stages that are installed one after the other (torch before what needs it)."""

    @property
    def pins(self) -> tuple[str, ...]:
        """All requirements, in order."""
        return tuple(pin for stage in self.requirements for pin in stage)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The output of a case's command."""

    stdout: str
    out: pathlib.Path
    """The empty folder it was given as ``{out}``."""


def printed_json(outcome: Outcome) -> Sample:
    """The sample that a command printed: its last line, a JSON object of numbers."""
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
    """May hold ``{python}`` (ours, or the peer's), ``{here}`` (the bench's folder), ``{out}`` (an
    empty folder) and ``{repetition}`` (0, 1, 2, ...: a seed)."""
    peer: Peer | None = None
    """Whose virtualenv runs it; None: ours."""
    requires: tuple[str, ...] = ()
    """Modules that our own interpreter must have for it."""
    cores: int = 1
    """How many cores it is pinned to."""
    threads: int | None = 1
    """``OMP_NUM_THREADS``; None leaves it unset."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0
    """seconds for one run"""
    read: Callable[[Outcome], Sample] = printed_json


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target for a measurement."""

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
