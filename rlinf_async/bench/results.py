"""What was measured: each case's samples, or why there are none."""

from __future__ import annotations

import dataclasses
import enum
import statistics


class Absence(enum.Enum):
    """Why a case has no samples."""

    NOT_ASKED = "needs --peers"
    """Its peer was not asked for: its bars are not measured."""
    MISSING = "peer missing"
    """Its peer could not be installed: its bars fell short."""
    SKIPPED = "skipped"
    """It cannot run on this machine: its bars are not measured."""
    FAILED = "failed"
    """Its command failed or printed no measurement: its bars fell short."""


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
