"""TensorBoard event files, written in line: no thread, so a full disk is seen where it happens."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path

# Generated modules make their classes when they are imported, which pyright cannot see.
from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
    RecordWriter,
)

from rlinf_async.observe.files import append_all, explaining


class TensorBoardSink:
    """Scalars into ``tensorboard/`` of a run folder, one event file per start of the run.

    Steps after ``resume_at`` in the files of earlier starts are purged: TensorBoard skips them.
    """

    def __init__(self, folder: Path, resume_at: int | None) -> None:
        events = folder / "tensorboard"
        with explaining("make", events):
            events.mkdir(parents=True, exist_ok=True)
            earlier = sorted(events.glob("events.out.tfevents.*"))
            self._path = events / _next_name(earlier)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if earlier:
            first = 0 if resume_at is None else resume_at + 1
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        with explaining("write", self._path):
            os.close(self._descriptor)

    def _add(self, event: Event) -> None:
        """Append a record, or nothing of it: half a record would hide all that come later."""
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with explaining("write", self._path):
            append_all(self._descriptor, record.getvalue())


def _next_name(earlier: list[Path]) -> str:
    """A name that sorts after those of earlier starts, also within a second or after a clock set
    back: TensorBoard reads the files in the order of their names, and purges by that order."""
    now = int(time.time())
    if earlier:
        stamp = earlier[-1].name.split(".")[3]
        now = max(now, int(stamp)) if stamp.isdecimal() else now
    return f"events.out.tfevents.{now:010d}.{len(earlier):04d}"
