"""MLflow: each row as metrics of one run, on a tracking server or in a database of the run folder.

Only the client is used, never what mlflow calls its active run. A database stores an infinite
number as the largest one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import msgspec

from rlinf_async.config.registry import ConfigError, needed
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun, flat

STATES: Final[dict[Outcome, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "killed": "KILLED",
}
LONGEST_PARAM: Final = 500
"""characters of a parameter that every server takes"""
METRICS_AT_ONCE: Final = 1000
PARAMS_AT_ONCE: Final = 100
SCHEMES: Final = ("http", "https", "sqlite", "file", "postgresql", "mysql", "databricks", "mssql")


class MlflowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``mlflow``."""

    tracking_uri: str = ""
    """``http://host:5000``, ``sqlite:///file.db``; empty: MLFLOW_TRACKING_URI, and without it
    ``sinks/mlflow.db`` of the run folder"""
    experiment: str = "rlinf-async"
    name: str = ""
    """name of the run; empty: that of its folder"""
    tags: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.experiment:
            raise ValueError("experiment is empty; it must be a name")


class MlflowSink(SinkPart):
    """See the module."""

    Config = MlflowConfig
    library = extra = "mlflow"
    factory = "rlinf_async.observe.sinks.mlflow:MlflowClient"
    environment: ClassVar[Mapping[str, str]] = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # rows are offered again from here
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }

    def check(self, settings: MlflowConfig, where: tuple[str, ...]) -> None:
        """Refuse an address of no kind that mlflow knows."""
        scheme = settings.tracking_uri.partition(":")[0].partition("+")[0]
        if settings.tracking_uri and scheme not in SCHEMES:
            raise ConfigError(
                f"{settings.tracking_uri!r} is no address of a tracking server: it begins with "
                f"one of {', '.join(f'{one}:' for one in SCHEMES)}",
                path=(*where, "tracking_uri"),
            )
        if scheme in ("http", "https") and not urlsplit(settings.tracking_uri).hostname:
            raise ConfigError(
                f"{settings.tracking_uri!r} names no host", path=(*where, "tracking_uri")
            )


class MlflowClient:
    """A run of mlflow; it keeps its id."""

    def __init__(self, settings: MlflowConfig, run: SinkRun, kept: dict[str, str]) -> None:
        needed("mlflow", extra="mlflow", needed_for="the metrics sink 'mlflow'")
        tracking = needed("mlflow.tracking", extra="mlflow", needed_for="the metrics sink 'mlflow'")
        self._entities = needed(
            "mlflow.entities", extra="mlflow", needed_for="the metrics sink 'mlflow'"
        )
        uri = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = uri or _own_database(run.files / "mlflow.db", tracking.MlflowClient)
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        self._id = kept.get("id") or self._create(settings, run)
        self._names: dict[str, str] = {}
        """names of metrics as mlflow takes them"""
        if "id" in kept:
            self._client.update_run(self._id, status="RUNNING")
        self._describe(run)
        self.kept = {"id": self._id, "where": uri}

    def _create(self, settings: MlflowConfig, run: SinkRun) -> str:
        found = self._client.get_experiment_by_name(settings.experiment)
        folder = (run.files / "mlflow").as_uri()
        own = settings.tracking_uri.startswith("sqlite") or not settings.tracking_uri
        where = folder if own and not os.environ.get("MLFLOW_TRACKING_URI") else None
        experiment = (
            self._client.create_experiment(settings.experiment, artifact_location=where)
            if found is None
            else found.experiment_id
        )
        name = settings.name or run.name
        made = self._client.create_run(experiment, run_name=name, tags=dict(settings.tags))
        run_id: str = made.info.run_id
        return run_id

    def _describe(self, run: SinkRun) -> None:
        """Log the configuration; what a resumed run has otherwise is a tag: parameters stay."""
        logged = self._client.get_run(self._id).data.params
        params = {
            _taken(name): str(value)[:LONGEST_PARAM]
            for name, value in flat(run.config).items()
            if value != ""
        }
        new = [self._entities.Param(*one) for one in params.items() if one[0] not in logged]
        changed = [
            self._entities.RunTag(f"resumed.{name}", text)
            for name, text in params.items()
            if logged.get(name, text) != text
        ]
        for some in _batches(new, PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=some)
        for some in _batches(changed, PARAMS_AT_ONCE):
            self._client.log_batch(self._id, tags=some)

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows under their own steps and times."""
        metrics = [
            self._entities.Metric(self._name(name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for some in _batches(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=some)

    def _name(self, name: str) -> str:
        """The name that a metric has there: another one for each name here."""
        if name not in self._names:
            wanted, used = _taken(name), set(self._names.values())
            numbered = (f"{wanted}.{number}" for number in itertools.count(2))
            free = (one for one in itertools.chain([wanted], numbered) if one not in used)
            self._names[name] = next(free)
        return self._names[name]

    def close(self, outcome: Outcome) -> None:
        """End the run."""
        self._client.set_tag(self._id, "outcome", outcome)
        self._client.set_terminated(self._id, STATES[outcome])


def _own_database(file: Path, client: Callable[..., Any]) -> str:
    """Return the address of a database in the run folder, made if it is not there.

    It is made beside its place: mlflow cannot go on with one whose making was cut off.
    """
    if not file.exists():
        partial = file.with_name(f"{file.name}.partial")
        for leftover in file.parent.glob(f"{partial.name}*"):
            leftover.unlink()
        client(tracking_uri=f"sqlite:///{partial}")
        partial.rename(file)
    return f"sqlite:///{file}"


def _taken(name: str) -> str:
    """A name of the characters that mlflow takes, which reads as a path there."""
    name = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    parts = (one.strip() for one in name.split("/"))
    return "/".join(one for one in parts if one not in ("", ".", ".."))[:250] or "_"


def _batches(some: list[Any], size: int) -> list[list[Any]]:
    return [some[start : start + size] for start in range(0, len(some), size)]
