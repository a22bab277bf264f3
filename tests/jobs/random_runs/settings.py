"""What a random run is, and what has to be true of it afterwards."""

from __future__ import annotations

import csv
import math
import pathlib
from typing import NamedTuple

Settings = dict[str, object]
"""of the command line, without the leading dashes"""


class RandomRun(NamedTuple):
    """A configuration, and what its metrics have to say."""

    text: str
    """the configuration file"""
    settings: Settings
    iterations: int
    steps: int
    """of an iteration: samples, or steps in environments"""
    column: str
    """that counts them, from the first iteration on"""
    max_staleness: int

    @property
    def arguments(self) -> list[str]:
        """The settings as the command line takes them."""
        return [
            text for name, value in self.settings.items() for text in (f"--{name}", _shown(value))
        ]

    def problems(self, folder: pathlib.Path) -> list[str]:
        """What is wrong with the metrics that a run of it has left in its folder."""
        path = folder / "metrics.csv"
        if not path.exists():
            return ["there is no metrics.csv"]
        with path.open(newline="") as file:
            every = list(csv.DictReader(file))
        rows = [row for row in every if row["iteration"]]
        found = []
        if (numbers := [int(row["iteration"]) for row in rows]) != list(range(self.iterations)):
            found.append(f"iterations {numbers} instead of 0 to {self.iterations - 1}")
        for number, row in enumerate(rows, 1):
            if float(row[self.column]) != number * self.steps:
                found.append(f"{row[self.column]} {self.column} instead of {number * self.steps}")
            if float(row["staleness_max"] or 0) > self.max_staleness:
                found.append(f"a staleness of {row['staleness_max']}")
        for row in every:
            found += [f"{name} is {value}" for name, value in row.items() if _infinite(value)]
        return found


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _infinite(value: str) -> bool:
    try:
        return bool(value) and not math.isfinite(float(value))
    except ValueError:  # a text
        return False
