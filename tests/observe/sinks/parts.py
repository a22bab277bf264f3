"""Sinks that do what servers do at times."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hangs: bool = False
    gate: str = ""
    """file without which no row is taken"""


class Client:
    """Appends rows to a file beside those of the sink."""

    def __init__(self, settings: Settings, run: SinkRun, kept: dict[str, str]) -> None:
        self.settings, self.file = settings, run.files / "rows.jsonl"
        self.kept = {"starts": kept.get("starts", "") + "x"}
        print("opened")

    def write(self, rows: Sequence[Row]) -> None:
        if self.settings.hangs:
            threading.Event().wait()
        if self.settings.gate and not Path(self.settings.gate).exists():
            raise ConnectionError("the server is gone")
        self._append(*(json.dumps([row.step, row.metrics]) for row in rows))

    def close(self, outcome: Outcome) -> None:
        self._append(json.dumps(outcome))

    def _append(self, *lines: str) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


class Part(SinkPart):
    Config = Settings
    factory = "tests.observe.sinks.parts:Client"

    def check(self, settings: Settings, where: tuple[str, ...]) -> None:
        if settings.hangs and settings.gate:
            raise ConfigError("it has no use where it hangs", path=(*where, "gate"))


class Dies(SinkPart):
    factory = "tests.observe.sinks.parts:die"


def die(settings: None, run: SinkRun, kept: dict[str, str]) -> None:
    import os

    os.kill(os.getpid(), 9)
