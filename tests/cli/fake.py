"""A job that starts nothing: it records what it was asked for, and fails on demand."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

from rlinf_async.config import ConfigError, MissingDevice, UsageError
from rlinf_async.observe.summary import Summary
from rlinf_async.runtime.signals import Terminated
from rlinf_async.workers import base as errors
from rlinf_async.workers.base import BuildError


class Settings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    lr: float = 1e-3


class FakeConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    seed: int = 0
    actor: Settings = Settings()
    device: str = "cpu"
    end: str = "well"
    """``well``, ``fell short``, or what `FakeJob.run` raises"""


class WorkerError(Exception):
    """Stands for an error of ours: its text is all that is shown."""

    __module__ = "rlinf_async.workers.base"


ENDINGS: dict[str, BaseException] = {
    "worker": WorkerError("env[1] (rank 1 of 2) raised ValueError in step: no such joint"),
    "setting": errors.WorkerError.of(
        ConfigError("there is no such file", path=("env", "entry_point")),
        worker="Env[1]",
        host="beta",
        pid=7,
        method="setup",
    ),
    "build": BuildError("channel 'numbers': nobody puts anything into it"),
    "disk": OSError(28, "No space left on device", "runs/a/metrics.csv"),
    "interrupt": KeyboardInterrupt(),
    "terminated": Terminated(),
    "group": ExceptionGroup("several", [WorkerError("env[0] died")]),
    "many": ExceptionGroup("several", [WorkerError("env[0] died"), RuntimeError("odd")]),
    "interrupted group": BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("odd")]),
}


class FakeJob:
    """Runs are recorded as ``(config, out, resume)``."""

    config_type: type[msgspec.Struct] = FakeConfig

    def __init__(self) -> None:
        self.runs: list[tuple[FakeConfig, pathlib.Path | None, bool]] = []

    def check(self, config: Any) -> None:
        if config.device != "cpu":
            raise MissingDevice(f"device {config.device!r} is not on this machine; there is: cpu")
        if config.actor.lr < 0:
            raise ConfigError(f"must not be negative, got {config.actor.lr}", path=("actor", "lr"))

    def run(self, config: Any, out: pathlib.Path | None, resume: bool) -> Summary:
        self.runs.append((config, out, resume))
        if config.end in ENDINGS:
            raise ENDINGS[config.end]
        return Summary(
            run="fake",
            outcome="fell short" if config.end == "fell short" else "finished",
            seed=config.seed,
            iterations=1,
            train_seconds=1.0,
        )

    def find(self, name: str) -> FakeJob:
        """Knows one name."""
        if name != "fake":
            raise UsageError(f"there is no job {name!r}; there are: fake")
        return self
