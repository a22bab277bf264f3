"""A sink in a process of its own, as the run sees it: rows go in, problems come out.

Nothing here waits for the sink: rows are put into a queue, which a thread empties into the pipe.
Only `close`, which a run calls when its event loop has ended, waits, and not without a limit.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec

from rlinf_async.config.registry import FOLDER, import_path
from rlinf_async.observe.files import MetricsError, explaining
from rlinf_async.observe.sinks.messages import (
    CLOSE_SECONDS,
    STOP_SECONDS,
    End,
    Ended,
    Failed,
    Opened,
    Opening,
    Recovered,
    Resume,
    ToChild,
    ToRun,
)
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun
from rlinf_async.processes import frame, how_it_ended, kill_group, read_message

QUEUED: Final = 10_000
"""rows on their way to the process, at most"""
MARGIN: Final = 2.0
"""seconds beyond its own limit after which the process is killed from here"""

log = logging.getLogger(__name__)


class SinkProcess:
    """The process of one sink; it starts at once, and opens the sink meanwhile.

    Args:
        name: name of the sink.
        part: what it is.
        settings: Struct of its settings, or None.
        run: the run that rows are of.
    """

    def __init__(self, name: str, part: SinkPart, settings: Any, run: SinkRun) -> None:
        self.name = name
        self.where = ""
        """where the rows can be looked at, once the sink is open"""
        self._lost = 0
        self._ended: Ended | None = None
        self._closed = False
        self._died = False
        """whether its process ended before the run did, which was said"""
        self._queue: queue.Queue[ToChild | None] = queue.Queue(maxsize=QUEUED)
        with explaining("make", run.files):
            run.files.mkdir(exist_ok=True)
        boot = (
            f"import sys; sys.path[:] = {[one or os.getcwd() for one in sys.path]!r}; "
            "from rlinf_async.observe.sinks.child import main; main()"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={FOLDER: os.getcwd(), **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise MetricsError(f"the process of {name!r} cannot be started: {error}") from error
        self._queue.put(
            Opening(
                name=name,
                factory=part.factory,
                kind="" if settings is None else import_path(type(settings)),
                settings=settings,
                run=run,
                environment=dict(part.environment),
            )
        )
        # Daemons: a driver that is ended in a hurry does not wait for them.
        self._sender = threading.Thread(target=self._send, name=f"rows to {name}", daemon=True)
        self._reader = threading.Thread(target=self._listen, name=f"sink {name}", daemon=True)
        self._sender.start()
        self._reader.start()

    def begin(self, resume_at: int | None) -> None:
        """Say which step the run goes on after; rows follow."""
        self._put(Resume(resume_at))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a row over, without waiting."""
        self._put(Row(step, dict(metrics), time.time()))

    def close(self, outcome: Outcome = "finished") -> None:
        """Say how the run has ended, and wait until the process has ended too, or kill it."""
        if self._closed:
            return
        self._closed = True
        seconds = STOP_SECONDS if outcome == "stopped" else CLOSE_SECONDS
        with suppress(queue.Full):  # then it is killed when its time is over
            self._queue.put(End(outcome, seconds), timeout=1.0)
        try:
            self._reader.join(seconds + MARGIN)
        finally:  # a Ctrl-C does not wait
            kill_group(self._process.pid)
            self._process.wait()
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._sender.join(1.0)
        lost = self._lost + (self._ended.lost if self._ended else 0)
        problems = [f"did not take {lost} rows"] if lost else []
        if self._ended is None and not self._died:  # from here, or by itself
            problems.append(f"did not end within {seconds:g} s")
        if problems:
            log.warning(
                "metrics sink %r %s; metrics.csv has every row, and sinks/%s.log what it printed",
                self.name,
                " and ".join(problems),
                self.name,
            )

    def _put(self, message: ToChild) -> None:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                log.warning("metrics sink %r does not take its rows: they are left out", self.name)

    def _send(self) -> None:
        """Write what is queued to the process, until it or the queue has ended."""
        assert self._process.stdin is not None
        try:
            while (message := self._queue.get()) is not None:
                self._process.stdin.write(frame(message))
                self._process.stdin.flush()
        except OSError:  # the process has ended: `_listen` says so
            pass
        finally:
            with suppress(OSError):
                self._process.stdin.close()

    def _listen(self) -> None:
        """Log what goes wrong, until the process has closed its end."""
        assert self._process.stdout is not None
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRun)
        file: BinaryIO = self._process.stdout  # type: ignore[assignment]
        with file:
            while (message := read_message(file, decoder)) is not None:
                self._take(message)
        if self._ended is None and not self._closed:
            self._died = True
            log.warning(
                "the process of metrics sink %r has ended (%s); the run goes on without it, and "
                "sinks/%s.log has what it printed",
                self.name,
                how_it_ended(self._process.wait()),
                self.name,
            )

    def _take(self, message: ToRun) -> None:
        if isinstance(message, Opened):
            self.where = message.where
        elif isinstance(message, Failed):
            log.warning(
                "metrics sink %r failed: %s; the run goes on, and rows wait for it",
                self.name,
                message.cause,
            )
        elif isinstance(message, Recovered):
            log.warning("metrics sink %r takes rows again", self.name)
        else:
            self._ended = message
