"""The process of one sink: takes rows from the run, gives them to the sink's library.

::

    run       Opening  Resume  Row ...  End          --> standard input
    process   Opened   Failed  Recovered  Ended      --> what was its standard output

What the library prints goes to ``sinks/NAME.log`` of the run folder. A row that the sink does not
take is offered again, after 1 s and then ever less often, until the run has ended; then for
the seconds that `End` says, whatever the library does meanwhile.

Invariant: a step that an earlier start has handed over is not handed over again. What it has not,
up to the step that the run goes on from, is taken from ``metrics.csv``.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from rlinf_async.config.registry import load_entry_point, raised
from rlinf_async.observe.files import ObserveError, atomic_write
from rlinf_async.observe.metrics import STEP, read_columns
from rlinf_async.observe.sinks.messages import (
    ORPHAN_SECONDS,
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
from rlinf_async.observe.sinks.part import Client, Outcome, Row, set_default_environment
from rlinf_async.processes import frame, leave_signals_to_driver, read_message

HAND_OVER: Final = 2 / 3
"""share of the seconds at the end for rows that were not handed over yet"""
FAILING_SECONDS: Final = 3.0
"""seconds of them where the sink does not take rows"""
ROWS_KEPT: Final = 10_000
"""rows that wait for a sink; those after them are lost to it"""
ROWS_AT_ONCE: Final = 200
LONGEST_PAUSE: Final = 30.0
"""seconds between two tries, at most"""


class State(msgspec.Struct):
    """Contents of ``sinks/NAME.json``."""

    step: int | None = None
    """last step that was handed over"""
    kept: dict[str, str] = {}


class Deliveries:
    """Rows on their way to one sink.

    Args:
        opening: what the run has said.
        reports: where to the run reads.
    """

    def __init__(self, opening: Opening, reports: BinaryIO) -> None:
        self._opening = opening
        self._reports = reports
        self._file = opening.run.files / f"{opening.name}.json"
        self._state = _state_in(self._file)
        self._earlier = self._state.step
        """last step that earlier starts have handed over"""
        self._client: Client | None = None
        self._waiting: deque[Row] = deque()
        self.lost = 0
        """rows that it will never get in this start"""
        self.failing = False
        self._pause = 0.0
        self.next_try = 0.0
        """monotonic time from which the rows, or the opening, are tried again"""

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done before the next message."""
        return self._client is not None and not self._waiting

    def resume(self, at: int | None) -> None:
        """Take the rows that earlier starts have written and did not hand over."""
        if at is None:
            return
        with suppress(ObserveError):  # the run's own writer says more
            columns = read_columns(Path(self._opening.run.folder) / "metrics.csv")
            steps = columns.pop(STEP)
            for index, step in enumerate(steps):
                row = {name: column[index] for name, column in columns.items()}
                known = {name: value for name, value in row.items() if not math.isnan(value)}
                if step <= at:
                    self.add(Row(int(step), known, time.time()))

    def add(self, row: Row) -> None:
        """Add a row, unless an earlier start has handed it over."""
        if self._earlier is not None and row.step <= self._earlier:
            return
        if len(self._waiting) < ROWS_KEPT:
            self._waiting.append(row)
        else:
            self.lost += 1

    def hand_over(self) -> bool:
        """Open the sink, or give it the next rows; return whether that succeeded."""
        before = self._state.step
        try:
            if self._client is None:
                self._client = self._open()
            elif self._waiting:
                rows = list(islice(self._waiting, ROWS_AT_ONCE))
                # First the step, then the rows: a kill between the two loses rows to the sink
                # rather than doubling them.
                self._keep(max(rows[-1].step, -1 if before is None else before))
                self._client.write(rows)
                for _ in rows:
                    self._waiting.popleft()
        except (Exception, SystemExit) as error:  # a library may raise anything
            with suppress(ObserveError):
                self._keep(before)
            self._fail(error)
            return False
        self._succeed()
        return True

    def close(self, outcome: Outcome) -> None:
        """Close the sink and tell the run what it did not take."""
        if self._client is not None:
            try:
                self._client.close(outcome)
            except (Exception, SystemExit) as error:
                self._fail(error)
        self._report(Ended(self.lost + len(self._waiting)))

    def _open(self) -> Client:
        opening = self._opening
        factory = load_entry_point(opening.factory)
        kind: Any = load_entry_point(opening.kind) if opening.kind else None
        settings = None if kind is None else msgspec.convert(opening.settings, kind)
        client: Client = factory(settings, opening.run, dict(self._state.kept))
        self._state.kept = client.kept
        self._keep(self._state.step)
        self._report(Opened(client.kept.get("where", "")))
        return client

    def _keep(self, step: int | None) -> None:
        self._state.step = step
        atomic_write(self._file, msgspec.json.encode(self._state), durable=False)

    def _fail(self, error: BaseException) -> None:
        self._pause = min(LONGEST_PAUSE, max(1.0, 2.0 * self._pause))
        self.next_try = time.monotonic() + self._pause
        if not self.failing:
            self.failing = True
            self._report(Failed(raised(error)))

    def _succeed(self) -> None:
        self._pause = self.next_try = 0.0
        if self.failing:
            self.failing = False
            self._report(Recovered())

    def _report(self, message: ToRun) -> None:
        with suppress(OSError):  # the run has ended
            self._reports.write(frame(message))
            self._reports.flush()


def _state_in(file: Path) -> State:
    try:
        return msgspec.json.decode(file.read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return State()


def main() -> None:
    """Serve one sink until the run has ended."""
    leave_signals_to_driver()
    reports = os.fdopen(os.dup(1), "wb")
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToChild)
    opening = read_message(sys.stdin.buffer, decoder)
    if not isinstance(opening, Opening):
        return
    _print_to(opening.run.files / f"{opening.name}.log")
    os.chdir(opening.run.files)
    set_default_environment(opening.environment)
    deliveries = Deliveries(opening, reports)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(decoder, inbox, deliveries), daemon=True).start()
    _serve(deliveries, inbox)
    # Threads and hooks of the library might wait for a server: what was to be sent is sent.
    _end_now()


def _serve(deliveries: Deliveries, inbox: queue.SimpleQueue[Any]) -> None:
    """Hand rows over until the run has ended, and close the sink."""
    end: End | None = None
    while end is None:
        pause = None if deliveries.idle else max(0.0, deliveries.next_try - time.monotonic())
        try:
            message = inbox.get(timeout=pause)
        except queue.Empty:
            deliveries.hand_over()
            continue
        if isinstance(message, Row):
            deliveries.add(message)
        elif isinstance(message, Resume):
            deliveries.resume(message.resume_at)
        else:
            end = message
    began = time.monotonic()
    while not deliveries.idle:
        limit = FAILING_SECONDS if deliveries.failing else HAND_OVER * end.seconds
        if time.monotonic() - began > limit:
            break
        if not deliveries.hand_over():
            time.sleep(0.5)
    deliveries.close(end.outcome)


def _read(
    decoder: msgspec.msgpack.Decoder[Any], inbox: queue.SimpleQueue[Any], deliveries: Deliveries
) -> None:
    """Put what the run says into the inbox; once it has ended, end this process in time.

    It never waits for the library, which may hang.
    """
    while True:
        message = read_message(sys.stdin.buffer, decoder)
        if message is None or isinstance(message, End):
            break
        if inbox.qsize() < ROWS_KEPT:
            inbox.put(message)
        else:
            deliveries.lost += 1
    end = End("killed", ORPHAN_SECONDS) if message is None else message
    limit = threading.Timer(end.seconds, _end_now)
    limit.daemon = True
    limit.start()
    inbox.put(end)


def _end_now() -> None:
    """End this process and all that its library has started: it leads their group."""
    os.killpg(0, signal.SIGKILL)


def _print_to(log: Path) -> None:
    log.parent.mkdir(exist_ok=True)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    os.close(opened)
