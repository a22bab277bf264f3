"""The sinks of one run, from before its first worker to after its last.

::

    OpenSinks(...)   processes of sinks start      before the run's event loop begins
    begin            plain sinks open              when the first row is near
    write ...        every sink                    never waits for a process
    end_rows         plain sinks close             in the loop
    close            processes are told how the    after the loop has ended
                     run has ended, and waited for
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from rlinf_async.observe.files import MetricsError, ObserveError
from rlinf_async.observe.sinks.config import ObserveConfig, find_sink
from rlinf_async.observe.sinks.part import Outcome, SinkRun
from rlinf_async.observe.sinks.process import SinkProcess

OUTCOMES: Final[dict[str, Outcome]] = {
    "failed": "failed",
    "stopped": "stopped",
    "terminated": "stopped",
}
"""by the outcome in the summary of a run that did not come to its end"""

log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Something that takes rows of metrics. A plain one is made as ``factory(folder, resume_at)``:
    run folder, last step to keep or None. Steps after that one will come again."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a row."""
        ...

    def close(self) -> None:
        """Write what was not written yet."""
        ...


class OpenSinks:
    """Sinks by name.

    Args:
        observe: which, and their settings.
        run: the run that rows are of.

    Raises:
        ConfigError: one is unknown, or its settings are wrong.
        MetricsError: a process cannot be started.
    """

    def __init__(self, observe: ObserveConfig, run: SinkRun) -> None:
        self._factories: dict[str, Any] = {}
        self._plain: dict[str, MetricsSink] = {}
        self._apart: list[SinkProcess] = []
        self._failing: set[str] = set()
        """names of the sinks that did not take their last row"""
        found = [(name, find_sink(name)) for name in observe.sinks]
        try:
            for name, part in found:
                if part.factory:
                    settings, _ = observe.of(name, part)
                    self._apart.append(SinkProcess(name, part, settings, run))
                else:
                    self._factories[name] = part.make  # type: ignore[attr-defined]
        except BaseException:
            self.close("failed")
            raise

    def begin(self, folder: Path, resume_at: int | None) -> None:
        """Open the plain sinks, and tell the others after which step rows come.

        Raises:
            MetricsError: one did not open.
        """
        try:
            for name, factory in self._factories.items():
                self._plain[name] = _open_sink(name, factory, folder, resume_at)
        except BaseException:
            self.end_rows()
            raise
        for one in self._apart:
            one.begin(resume_at)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Give a row to every sink. What a plain one raises is logged once, until it takes a row
        again."""
        for name, sink in self._plain.items():
            with self._surviving(name, f"at step {step}"):
                sink.write(step, row)
        for one in self._apart:
            one.write(step, row)

    def end_rows(self) -> None:
        """Close the plain sinks: no row follows."""
        while self._plain:
            name, sink = self._plain.popitem()
            with self._surviving(name, "when it was closed"):
                sink.close()

    def close(self, outcome: Outcome) -> None:
        """Close all sinks. It waits for their processes, all at once, and not without a limit."""
        self.end_rows()
        apart, self._apart = self._apart, []
        if apart:
            with ThreadPoolExecutor(len(apart), "close sinks") as pool:
                list(pool.map(lambda one: one.close(outcome), apart))

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


def _open_sink(name: str, factory: Any, folder: Path, resume_at: int | None) -> MetricsSink:
    try:
        opened: MetricsSink = factory(folder, resume_at)
    except ObserveError:
        raise
    except Exception as error:
        raise MetricsError(_broken(name, "when it was opened", error)) from error
    return opened


def _broken(name: str, when: str, error: Exception) -> str:
    kind = "" if isinstance(error, ObserveError) else f"{type(error).__name__}: "
    return f"metrics sink {name!r} failed {when}: {kind}{error}"
