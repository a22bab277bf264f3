"""Trackio: each row as a step of one run, in a local database or on a Space of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rlinf_async.config.registry import ConfigError, needed
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun, flat


class TrackioConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``trackio``."""

    project: str = "rlinf-async"
    name: str = ""
    """name of the run; empty: that of its folder"""
    group: str = ""
    space: str = ""
    """``user/name`` of a Space; empty: a local database"""
    folder: str = ""
    """folder of the local database, for several runs; empty: TRACKIO_DIR, and without it
    ``sinks/trackio`` of the run folder"""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("project is empty; it must be a name")


class TrackioSink(SinkPart):
    """See the module."""

    Config = TrackioConfig
    library = extra = "trackio"
    factory = "rlinf_async.observe.sinks.trackio:TrackioClient"
    environment: ClassVar[Mapping[str, str]] = {"HF_HUB_DISABLE_TELEMETRY": "1"}

    def check(self, settings: TrackioConfig, where: tuple[str, ...]) -> None:
        """Refuse a Space that is not named in full, and a folder that is a file."""
        if settings.space and settings.space.count("/") != 1:
            raise ConfigError(
                f"{settings.space!r} is no Space: it is named 'user/name'", path=(*where, "space")
            )
        if settings.space and settings.folder:
            raise ConfigError(
                "a run is either on a Space or in a folder: leave one of them out",
                path=(*where, "folder"),
            )
        if settings.folder and Path(settings.folder).expanduser().is_file():
            raise ConfigError(
                f"{settings.folder!r} is a file: name a folder", path=(*where, "folder")
            )


class TrackioClient:
    """A run of trackio, which knows it by its name."""

    def __init__(self, settings: TrackioConfig, run: SinkRun, kept: dict[str, str]) -> None:
        own = Path(os.environ["RLINF_ASYNC_FOLDER"], settings.folder).expanduser()
        folder = str(own) if settings.folder else os.environ.get("TRACKIO_DIR")
        # It is read when the library is imported.
        os.environ["TRACKIO_DIR"] = folder or str(run.files / "trackio")
        if not settings.space:
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask who the user is
        trackio = needed("trackio", extra="trackio", needed_for="the metrics sink 'trackio'")
        name = kept.get("name") or settings.name or run.name
        self._run: Any = trackio.init(
            project=settings.project,
            name=name,
            group=settings.group or None,
            space_id=settings.space or None,
            config=flat(run.config),
            resume="allow" if "name" in kept else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.kept = {"name": name, "where": settings.space or os.environ["TRACKIO_DIR"]}

    def write(self, rows: Sequence[Row]) -> None:
        """Log rows under their own steps."""
        for row in rows:
            self._run.log(dict(row.metrics), step=row.step)

    def close(self, outcome: Outcome) -> None:
        """Finish the run; it knows no state, so nothing says how."""
        self._run.finish()
