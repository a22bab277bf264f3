"""Metrics of a run: one row of numbers per iteration, in a CSV and in named sinks.

The CSV is the record that everything else reads; a sink (`rlinf_async.observe.sinks`, or one from
the entry point group ``rlinf_async.metrics``) gets the same rows.

The first column is ``step``. A new name becomes a new last column: the file is then replaced by one
with the longer header, at once. A row is one write to the end of the file, so a kill can tear only
the last line; a torn line is dropped when the file is opened again.

Invariant: however often a run is killed and resumed, each step stands in the CSV once.
"""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, SupportsFloat

from rlinf_async.config import ConfigError
from rlinf_async.observe.files import (
    MetricsError,
    RunFolderError,
    append_all,
    atomic_write,
    explaining,
)
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.sinks.part import Outcome, SinkRun

STEP = "step"
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""Errors that say that there is no such file any more."""

log = logging.getLogger(__name__)


class CsvLog:
    """An open CSV log. ``keep_to`` is the last step of the old file to keep; None keeps nothing."""

    def __init__(self, path: Path, *, keep_to: int | None) -> None:
        self._path = path
        self._descriptor: int | None = None
        header, rows = _read(path)
        kept = [row for row in rows if keep_to is not None and _is_kept(row, header, keep_to)]
        self.dropped_rows = len(rows) - len(kept)
        self._columns: list[str] = []
        self._unwritten: list[dict[str, float]] = []
        self._replace(header if kept else [STEP], kept)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row. Where the disk is full, or the like, rows wait for the next one, which is
        logged once.

        Raises:
            MetricsError: a metric is named ``step``, or its name holds a line break.
            RunFolderError: the file was closed, or is not in its place any more.
        """
        for name in (STEP, *metrics):
            _check_name(name, metrics)
        if self._descriptor is None:
            raise RunFolderError(f"{self._path} was closed and then written to")
        self._unwritten.append({STEP: step, **metrics})
        self.check_in_place()
        try:
            self._write_all()
        except RunFolderError as error:
            if len(self._unwritten) == 1:
                log.warning("%s. The run goes on, and rows wait until they can be written", error)

    def _write_all(self) -> None:
        new = [name for row in self._unwritten for name in row if name not in self._columns]
        if new:
            self._widen(list(dict.fromkeys(new)))
        lines = [_line(_text(row.get(name)) for name in self._columns) for row in self._unwritten]
        assert self._descriptor is not None
        with explaining("write", self._path):
            append_all(self._descriptor, "".join(lines).encode())
        self._unwritten.clear()

    def check_in_place(self) -> None:
        """Raise `RunFolderError` where the file is not at its path any more: what is written to it
        reaches nobody."""
        if self._descriptor is None:
            return
        try:
            if os.path.samestat(os.fstat(self._descriptor), self._path.stat()):
                return
        except OSError as error:
            if error.errno not in GONE:  # a disk or server that does not answer now may do so again
                return
        raise RunFolderError(
            f"{self._path} was removed, moved or replaced while the run went on: what it writes "
            "reaches nobody. Leave the folder of a run in its place until it has ended "
            f"(rlinf-async stop {self._path.parent})"
        )

    def close(self) -> None:
        """Write the rows that wait, and close the file.

        Raises:
            RunFolderError: they still cannot be written, or it is not in its place any more.
        """
        if self._descriptor is None:
            return
        try:
            self.check_in_place()
            self._write_all()
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def _widen(self, new: list[str]) -> None:
        header, rows = _read(self._path)
        self._replace([*header, *new], [row for row in rows if len(row) == len(header)])

    def _replace(self, columns: list[str], rows: list[list[str]]) -> None:
        """Write the whole file anew, and append to that one from here on."""
        lines = [_line(columns)]
        lines += [_line([*row, *[""] * (len(columns) - len(row))]) for row in rows]
        atomic_write(self._path, "".join(lines))
        with explaining("open", self._path):
            opened = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._columns = opened, columns


def read_columns(path: Path) -> dict[str, list[float]]:
    """The columns of a metrics file by name; NaN where a row has no value. Torn rows are left out.

    Raises:
        RunFolderError: the file cannot be read, or is not such a CSV.
    """
    header, rows = _read(path)
    whole = [row for row in rows if len(row) == len(header)]
    try:
        numbers = [[float(cell) if cell else float("nan") for cell in row] for row in whole]
    except ValueError as error:
        raise RunFolderError(f"{path} holds something that is not a number: {error}") from error
    return {name: [row[column] for row in numbers] for column, name in enumerate(header)}


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows, torn ones included; an absent or empty file has the header ``step``."""
    with explaining("read", path):
        content = path.read_bytes() if path.exists() else b""
    whole, _, torn = content.decode(errors="replace").rpartition("\n")
    rows = list(csv.reader(io.StringIO(whole, newline="")))
    if torn and rows:
        rows.append([])
    if not rows:
        return [STEP], []
    if rows[0][:1] != [STEP]:
        raise RunFolderError(
            f"{path} does not start with a column {STEP!r}: it is not a metrics file of a run; "
            "move it away"
        )
    return rows[0], rows[1:]


def _is_kept(row: list[str], header: list[str], keep_to: int) -> bool:
    return len(row) == len(header) and row[0].isdecimal() and int(row[0]) <= keep_to


def _check_name(name: str, metrics: Mapping[str, float]) -> None:
    if name == STEP and STEP in metrics:
        raise MetricsError(f"a metric may not be named {STEP!r}: that column is the row's step")
    if not name or "\n" in name or "\r" in name:
        raise MetricsError(f"{name!r} cannot name a metric: it is empty or holds a line break")


def _line(cells: Iterable[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(list(cells))
    return buffer.getvalue()


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.12g}"


# The names that the learning curve and the live view know; a run may write any others beside them.
ENV_STEPS: Final = "env_steps"
SECONDS: Final = "train_seconds"
RETURN: Final = "return"
SUCCESS_RATE: Final = "success_rate"
SAMPLES: Final = "samples"
EXAMPLES: Final = "examples"
REWARD: Final = "reward"
ACCURACY: Final = "accuracy"
RESPONSE_TOKENS: Final = "response_tokens"


class MetricsWriter:
    """Writes rows to ``metrics.csv`` and to sinks.

    Args:
        folder: the run folder.
        resume_at: the last step to keep of an earlier start; later rows are dropped, because they
            will be made again. None keeps nothing.
        sinks: the sinks of a run, which closes them; or names of some, with their defaults, which
            are closed with the CSV: those of `rlinf_async.observe.sinks`, or of the entry point
            group ``rlinf_async.metrics``.

    Raises:
        RunFolderError: a file cannot be written.
        MetricsError: a sink is unknown or did not open.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_at: int | None = None,
        sinks: Sequence[str] | OpenSinks = ("tensorboard",),
    ) -> None:
        path = Path(folder)
        self._own: OpenSinks | None = None
        if isinstance(sinks, OpenSinks):
            self._sinks = sinks
        else:
            self._sinks = self._own = _opened(sinks, path)
        try:
            self._csv = CsvLog(path / "metrics.csv", keep_to=resume_at)
            try:
                self._sinks.begin(path, resume_at)
            except BaseException:
                self._csv.close()
                raise
        except BaseException:
            if self._own is not None:
                self._own.close("failed")
            raise

    @property
    def dropped_rows(self) -> int:
        """Rows of earlier starts that were dropped: past the resume point, or torn by a kill."""
        return self._csv.dropped_rows

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write one row. A metric seen for the first time becomes a new column at the end.

        A sink that fails, on a full disk or because its server is gone, does not end the run: that
        is logged once, until it takes a row again, and the CSV has every row.

        Raises:
            MetricsError: a metric is not a number.
            RunFolderError: the CSV is not in its place any more.
        """
        row = {name: _as_number(name, value) for name, value in metrics.items()}
        self._csv.write(step, row)
        self._sinks.write(step, row)

    def close(self, outcome: Outcome = "finished") -> None:
        """Close the CSV, and every sink that is not the run's to close.

        Raises:
            RunFolderError: the CSV is not in its place, or has rows that cannot be written.
        """
        self._sinks.end_rows()
        try:
            self._csv.close()
        finally:
            if self._own is not None:
                self._own.close(outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close("finished" if error is None else "failed")
        except RunFolderError:
            if error is None:
                raise  # otherwise the error on its way out is the first cause


def _opened(names: Sequence[str], folder: Path) -> OpenSinks:
    """Sinks by name, with their defaults, of a writer that no run stands behind.

    Raises:
        MetricsError: one is unknown or did not open.
    """
    run = SinkRun(folder=str(folder.absolute()), name=folder.absolute().name)
    try:
        return OpenSinks(ObserveConfig(sinks=tuple(names)), run)
    except ConfigError as error:
        raise MetricsError(error.problem) from error


def _as_number(name: str, value: SupportsFloat) -> float:
    """A plain int or float of whatever was given: a numpy scalar, a one-element tensor."""
    if isinstance(value, int):
        return int(value)
    try:
        if isinstance(value, str):
            raise TypeError("a string is not a number")
        return float(value)
    except (TypeError, ValueError) as error:
        raise MetricsError(f"metric {name!r} is {value!r}, which is not a number") from error
