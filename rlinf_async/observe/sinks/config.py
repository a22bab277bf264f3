"""The section ``[observe]``: the sinks of a run by name, and the settings of each."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rlinf_async.config.convert import convert
from rlinf_async.config.registry import ConfigError, Path, Registry
from rlinf_async.observe.sinks.mlflow import MlflowConfig
from rlinf_async.observe.sinks.part import SinkPart
from rlinf_async.observe.sinks.prometheus import PrometheusConfig
from rlinf_async.observe.sinks.trackio import TrackioConfig
from rlinf_async.observe.sinks.wandb import WandbConfig

SINK_GROUP: Final = "rlinf_async.metrics"
SECTION: Final = "observe"
OWN: Final = "rlinf_async.observe"
sinks: Registry[SinkPart] = Registry(
    "metrics sink",
    # Imported when asked for: it takes a quarter of a second, which a worker that only traces
    # need not.
    entries={
        "mlflow": f"{OWN}.sinks.mlflow:MlflowSink",
        "prometheus": f"{OWN}.sinks.prometheus:PrometheusSink",
        "tensorboard": f"{OWN}.tensorboard_sink:TensorBoardSink",
        "trackio": f"{OWN}.sinks.trackio:TrackioSink",
        "wandb": f"{OWN}.sinks.wandb:WandbSink",
    },
    group=SINK_GROUP,
    called_with=("folder", "resume_at"),
    described_by=SinkPart,
)


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the metrics of a run go."""

    sinks: tuple[str, ...] = ("tensorboard",)
    """sinks beside ``metrics.csv``; others by the entry point group ``rlinf_async.metrics``"""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    options: dict[str, dict[str, Any]] = {}
    """settings of other sinks, by name"""

    def __post_init__(self) -> None:
        twice = sorted({name for name in self.sinks if self.sinks.count(name) > 1})
        if twice:
            raise ValueError(f"sinks has {twice[0]!r} twice; name each once")

    def of(self, name: str, part: SinkPart) -> tuple[Any, Path]:
        """Return the settings of a sink, and where they stand.

        Raises:
            ConfigError: they are not those that it takes.
        """
        if name in self.__struct_fields__ and name not in ("sinks", "options"):
            return getattr(self, name), (SECTION, name)
        where = (SECTION, "options", name)
        if part.Config is not None:
            return convert(self.options.get(name, {}), part.Config, where), where
        if name in self.options:
            raise ConfigError("it has no settings: leave them out", path=where)
        return None, where


def check_sinks(observe: ObserveConfig) -> None:
    """Check every sink that is named, before a worker starts.

    Raises:
        ConfigError: one is unknown, or a setting of one is wrong.
        MissingExtra: its package is not installed.
    """
    for name in observe.sinks:
        part = find_sink(name)
        settings, where = observe.of(name, part)
        part.check_installed(f"the metrics sink {name!r}")
        part.check(settings, where)
    for name in observe.options.keys() - set(observe.sinks):
        raise ConfigError(
            f"{SECTION}.sinks does not name {name!r}: add it there, or leave its settings out",
            path=(SECTION, "options", name),
        )


def find_sink(name: str) -> SinkPart:
    """Return a sink by name, imported: a run looks for it before its event loop begins, which the
    import, from a cold disk, would hold up for seconds.

    Raises:
        ConfigError: there is none of that name, or its package does not import.
    """
    path = (SECTION, "sinks")
    try:
        return sinks.check(name, path)
    except ConfigError as error:
        raise ConfigError(
            f"{error.problem}. A package adds one by the entry point group {SINK_GROUP!r}",
            path=path,
        ) from error
