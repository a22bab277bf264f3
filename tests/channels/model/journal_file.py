"""The events of a process that may be killed: each is in a file before its process goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from tests.channels.model.history import Event, Journal
from tests.channels.model.program import SENDING

LENGTH = 4
"""Bytes of the length that stands before each record."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """An event as it is now; the last one of its number counts."""

    number: int
    event: Event


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class FileJournal:
    """Writes events, and kills this process after so many records."""

    def __init__(self, path: str, kill_after: int | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._left = kill_after
        self._journal = Journal(time.monotonic_ns)

    def begin(self, event: Event) -> None:
        self._journal.begin(event)
        self._write(event)

    def hand(self, event: Event) -> None:
        self._write(event)

    def finish(self, event: Event) -> None:
        self._journal.finish(event)
        self._write(event)

    def after(self, finished: int) -> asyncio.Future[None]:
        return self._journal.after(finished)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, event: Event) -> None:
        data = _encode(Record(event.begun, event))
        os.write(self._file, len(data).to_bytes(LENGTH) + data)
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def read_events(path: Path) -> list[Event]:
    """The events of one process, as they were last."""
    found: dict[tuple[int, int], Event] = {}
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + LENGTH <= len(data):
        length = int.from_bytes(data[at : at + LENGTH])
        if at + LENGTH + length > len(data):
            break  # it is being written
        record = _decode(data[at + LENGTH : at + LENGTH + length])
        found[record.event.task, record.number] = record.event
        at += LENGTH + length
    return [*found.values()]


def judge_death(events: list[Event]) -> None:
    """The process was killed: what it had begun is open, and what it put may not have been sent."""
    sure: dict[object, int] = {}
    for event in events:
        if event.do == "flush" and event.outcome == "ok":
            sure[event.end] = max(sure.get(event.end, 0), event.begun)
    for event in events:
        if not event.finished:
            event.died = True
        elif event.do in SENDING and event.outcome == "ok":
            event.died = event.finished > sure.get(event.end, 0)
