"""Metrics of a run: one row of numbers per iteration, in a CSV and in named sinks.

The CSV is the record that everything else reads; a sink (TensorBoard, or one from the entry point
group ``rlinf_async.metrics``) gets the same rows.

Invariant: however often a run is killed and resumed, each step stands in the CSV once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, SupportsFloat

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import Registry, UnknownName
from rlinf_async.observe.csv_log import CsvLog
from rlinf_async.observe.errors import MetricsError, ObserveError, RunFolderError

log = logging.getLogger(__name__)

SINK_GROUP: Final = "rlinf_async.metrics"
sinks: Registry[SinkFactory] = Registry(
    "metrics sink",
    # Imported when asked for: it takes a quarter of a second, which a worker that only traces
    # need not.
    entries={"tensorboard": "rlinf_async.observe.tensorboard_sink:TensorBoardSink"},
    group=SINK_GROUP,
    called_with=("folder", "resume_at"),
)

# The names that the learning curve and the live view know; a run may write any others beside them.
ENV_STEPS: Final = "env_steps"
SECONDS: Final = "train_seconds"
RETURN: Final = "return"
SUCCESS_RATE: Final = "success_rate"
SAMPLES: Final = "samples"
REWARD: Final = "reward"
ACCURACY: Final = "accuracy"
RESPONSE_TOKENS: Final = "response_tokens"


class MetricsSink(Protocol):
    """Something that takes rows of metrics. Made as ``factory(folder, resume_at)``."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


SinkFactory = Callable[[Path, int | None], MetricsSink]
"""``(run folder, last step to keep or None)`` -> sink. Steps after that one will come again."""


class MetricsWriter:
    """Writes rows to ``metrics.csv`` and to the named sinks.

    Args:
        folder: the run folder.
        resume_at: the last step to keep of an earlier start; later rows are dropped, because they
            will be made again. None keeps nothing.
        sinks: names of sinks: ``tensorboard``, or those of the entry point group
            ``rlinf_async.metrics``.

    Raises:
        RunFolderError: a file cannot be written.
        MetricsError: a sink is unknown or did not open.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resume_at: int | None = None,
        sinks: Sequence[str] = ("tensorboard",),
    ) -> None:
        path = Path(folder)
        factories = {name: find_sink(name) for name in sinks}
        self._csv = CsvLog(path / "metrics.csv", keep_to=resume_at)
        self._sinks: dict[str, MetricsSink] = {}
        self._failing: set[str] = set()
        """names of the sinks that did not take their last row"""
        try:
            for name, factory in factories.items():
                self._sinks[name] = _open_sink(name, factory, path, resume_at)
        except BaseException:
            self.close()
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
        for name, sink in self._sinks.items():
            with self._surviving(name, f"at step {step}"):
                sink.write(step, row)

    def close(self) -> None:
        """Close the CSV and every sink.

        Raises:
            RunFolderError: the CSV is not in its place, or has rows that cannot be written.
        """
        while self._sinks:
            name, sink = self._sinks.popitem()
            with self._surviving(name, "when it was closed"):
                sink.close()
        self._csv.close()

    @contextmanager
    def _surviving(self, name: str, when: str) -> Iterator[None]:
        """Log what a sink raises, if it is not known to fail already."""
        try:
            yield
        except Exception as error:
            if name not in self._failing:
                self._failing.add(name)
                log.warning("%s; the run goes on without it", _broken(name, when, error))
        else:
            self._failing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RunFolderError:
            if error is None:
                raise  # otherwise the error on its way out is the first cause


def find_sink(name: str) -> SinkFactory:
    """The factory of a sink by name, imported: a run looks for it before its event loop begins,
    which the import, from a cold disk, would hold up for seconds.

    Raises:
        MetricsError: there is none of that name, or its package does not import.
    """
    try:
        return sinks.load(name, ("training", "metrics"))
    except (UnknownName, ConfigError) as error:
        problem = error.problem if isinstance(error, ConfigError) else str(error)
        raise MetricsError(
            f"{problem}. A package adds one by the entry point group {SINK_GROUP!r}"
        ) from error


def _open_sink(name: str, factory: SinkFactory, folder: Path, resume_at: int | None) -> MetricsSink:
    try:
        return factory(folder, resume_at)
    except ObserveError:
        raise
    except Exception as error:
        raise MetricsError(_broken(name, "when it was opened", error)) from error


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


def _broken(name: str, when: str, error: Exception) -> str:
    kind = "" if isinstance(error, ObserveError) else f"{type(error).__name__}: "
    return f"metrics sink {name!r} failed {when}: {kind}{error}"
