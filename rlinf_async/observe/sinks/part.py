"""What a metrics sink says about itself, and what it is told about its run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec

from rlinf_async.config.registry import Part

FOLDER: Final = "sinks"
"""folder in that of a run where sinks keep their files"""

Outcome = Literal["finished", "failed", "stopped", "killed"]
"""how a run ended; ``killed``: its process went without saying so"""


class SinkRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that rows are of, as sinks are told."""

    folder: str
    name: str
    """name of the run's folder"""
    config: dict[str, Any] = {}
    """configuration as plain tables; environment variables are left out"""

    @property
    def files(self) -> Path:
        """Folder for what the sinks keep."""
        return Path(self.folder) / FOLDER


class Row(msgspec.Struct, frozen=True, tag=True):
    """One row of metrics. Run -> sink."""

    step: int
    metrics: dict[str, float]
    time: float
    """seconds since 1970"""


class Client(Protocol):
    """A sink inside its process: made as ``factory(settings, run, kept)``.

    What it raises is told to the user once; the rows are offered again, until it takes them.
    """

    kept: dict[str, str]
    """what the sink has to know when the run is resumed: its id of the run"""

    def write(self, rows: Sequence[Row]) -> None:
        """Take these rows, in the order of their steps."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Say how the run has ended, and send what was not sent yet."""
        ...


class SinkPart(Part):
    """Description of a sink.

    One with a ``factory`` runs in a process of its own: the factory, called with its settings, the
    `SinkRun` and what it has kept of an earlier start, returns a `Client`. A plain factory, called
    with the run's folder and the last step to keep, returns a `MetricsSink` and runs in the process
    of the run.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    """variables of its process, where the user has not set them"""

    def check(self, settings: Any, where: tuple[str, ...]) -> None:
        """Refuse what can be refused before a worker starts.

        Raises:
            ConfigError: with the path of the setting, below ``where``.
        """


def plain_tables(config: Any) -> dict[str, Any]:
    """Return a configuration as plain tables, without environment variables: they hold secrets."""
    tables = msgspec.to_builtins(config, str_keys=True)
    cleaned: dict[str, Any] = _without(tables, {"env_vars", "runtime_env"})
    return cleaned


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float]:
    """Return ``{"actor.lr": 1e-05}`` of nested tables: numbers, and all else as texts."""
    found: dict[str, str | int | float] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            kept = isinstance(value, str | int | float)
            found[prefix + name] = value if kept else repr(value)
    return found


def set_default_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, names) for key, one in value.items() if key not in names}
    if isinstance(value, list | tuple):
        return [_without(one, names) for one in value]
    return value
