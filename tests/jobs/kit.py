"""Small runs of a job, by the command line's own `main`, in this process."""

from __future__ import annotations

import csv
import pathlib
from typing import Generic, NamedTuple

import pytest

from rlinf_async.cli import main
from rlinf_async.observe.summary import AnySummary, read_summary


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Job(Generic[AnySummary]):
    """One configuration file and one run folder."""

    def __init__(
        self,
        file: pathlib.Path,
        text: str,
        capture: pytest.CaptureFixture[str],
        summary_kind: type[AnySummary],
    ) -> None:
        file.write_text(text, encoding="utf-8")
        self.file = file
        self.out = file.parent / "run"
        self._capture = capture
        self._summary_kind = summary_kind

    def keep_checkpoints_on(self, disk: pathlib.Path) -> None:
        """By a link, as users do. What else the run writes then never fails for want of space."""
        self.out.mkdir()
        (self.out / "checkpoints").symlink_to(disk, target_is_directory=True)

    def train(self, *arguments: object) -> Ended:
        """``rlinf-async train FILE --out run ...``."""
        return self.command("train", self.file, "--out", self.out, *arguments)

    def command(self, *arguments: object) -> Ended:
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self._capture.readouterr()
        return Ended(code, printed.out, printed.err)

    def succeed(self, *arguments: object) -> AnySummary:
        """Train, and expect it to end well."""
        ended = self.train(*arguments)
        assert ended.code == 0, ended.err
        return self.summary

    @property
    def summary(self) -> AnySummary:
        return read_summary(self.out / "summary.json", self._summary_kind)

    @property
    def iterations(self) -> list[dict[str, str]]:
        """The rows of ``metrics.csv`` that tell of an iteration."""
        return rows_of(self.out)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.out / "checkpoints").glob("version-*"))


def rows_of(run: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a run's ``metrics.csv`` that tell of an iteration."""
    with (run / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["iteration"]]
