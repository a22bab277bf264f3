"""What workers print: their standard output and error, line by line, under the worker's name.

::

    worker's process: fd 1 and 2 ---pipe---> OutputPipe (this process) ---lines---> OutputLog
                                                                               a file, or stderr

What a worker prints last, before it is killed or crashes, is still in the pipe and is not lost. The
pipe holds 1 MiB: a worker that prints more while this process stands still waits for it.

A worker's process imports the main module before it has the pipe: what it prints until then, also
an error of that import, goes to the standard error of this process.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

PIPE_BYTES: Final = 1 << 20
LONGEST_LINE: Final = 1 << 16
"""bytes; what is longer is cut into several lines"""
OPENED: Final = b"\0"
"""first byte in the pipe: the worker's process prints there from now on"""
LINES_AT_ONCE: Final = 50_000
"""lines that a worker may print before it is limited"""
LINES_PER_SECOND: Final = 200
"""lines of a worker that are written, in the long run"""
LAST_LINES: Final = 200
"""of the lines that are left out, the last ones are written when the worker ends"""


class LineLimit:
    """Limits the lines of one worker, so that a flood fills neither disk nor terminal.

    Lines are left out until a second's worth may be written again; then it is said how many.
    """

    def __init__(self) -> None:
        self._room = float(LINES_AT_ONCE)
        self._looked = 0.0
        self._left_out = 0
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def allowed(self, lines: Sequence[str], now: float) -> list[str]:
        """Those of the lines that are written.

        Args:
            now: seconds, by any clock that does not go back.
        """
        self._room += (now - self._looked) * LINES_PER_SECOND
        self._room, self._looked = min(self._room, LINES_AT_ONCE), now
        written: list[str] = []
        if self._left_out and self._room >= LINES_PER_SECOND:
            written += self._note(self._left_out)
            self._left_out = 0
            self._last.clear()
        count = 0 if self._left_out else min(len(lines), int(self._room))
        self._room -= count
        self._left_out += len(lines) - count
        self._last.extend(lines[count:])
        return [*written, *lines[:count]]

    def rest(self) -> list[str]:
        """The last of the lines that were left out, once no more come."""
        lines = [*self._note(self._left_out - len(self._last)), *self._last]
        self._left_out = 0
        self._last.clear()
        return lines

    @staticmethod
    def _note(count: int) -> list[str]:
        limit = f"more than {LINES_PER_SECOND} a second"
        return [f"... {count} lines are left out: {limit} ..."] if count > 0 else []


class OutputLog:
    """Takes the lines of all workers of a cluster.

    Args:
        path: a file to append to, with the time of day; None for standard error.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._broken = False
        self._limits: dict[str, LineLimit] = {}
        """by worker"""

    @property
    def place(self) -> str:
        """Where the lines are, for a message."""
        return "on stderr" if self.path is None else f"in {self.path}"

    def write(self, worker: str, lines: list[str]) -> None:
        """Take lines of one worker. A disk that is full does not end the run."""
        limit = self._limits.setdefault(worker, LineLimit())
        self._write(worker, limit.allowed(lines, time.monotonic()))

    def end(self, worker: str) -> None:
        """Take note that a worker has printed its last line."""
        limit = self._limits.pop(worker, None)
        if limit is not None:
            self._write(worker, limit.rest())

    def close(self) -> None:
        """Take note that no worker prints any more."""
        for worker in list(self._limits):
            self.end(worker)

    def _write(self, worker: str, lines: list[str]) -> None:
        if not lines:
            return
        try:
            if self.path is None:
                sys.stderr.write("".join(f"{worker}: {line}\n" for line in lines))
                sys.stderr.flush()
            else:
                now = time.strftime("%H:%M:%S")
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{now} {worker}: {line}\n" for line in lines))
        except (OSError, ValueError) as error:  # ValueError: stderr is closed
            if not self._broken:
                log.warning("the output of workers cannot be written %s: %s", self.place, error)
            self._broken = True


class OutputPipe:
    """The pipe from one worker's process. Where a process is given it, it prints there."""

    def __init__(self, log: OutputLog, worker: str) -> None:
        self._log, self._worker = log, worker
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        with suppress(OSError, AttributeError):  # where it may not be so large, it is smaller
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.opened = False
        """whether the process has begun to print here; before, its output goes to stderr"""
        self._line = b""
        """the beginning of a line whose end has not come"""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    def __reduce__(self) -> tuple[Callable[[Any], None], tuple[Any]]:
        """In the process that is started: print into the pipe, from the moment it is unpickled."""
        return _print_into, (DupFd(self._write_end),)

    def started(self) -> None:
        """Let go of the end that the process has now."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self) -> None:
        """Write what the process has printed, and close the pipe."""
        self.started()
        left = PIPE_BYTES  # and no more: what the process has started may still print
        while self._read_end >= 0 and left > 0 and (count := self._read()):
            left -= count
        self._end()

    def _read(self) -> int:
        """Take what is there, and return how many bytes it was."""
        try:
            data = os.read(self._read_end, LONGEST_LINE)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        count = len(data)
        if not self.opened:
            self.opened = True
            data = data.removeprefix(OPENED)
        *whole, self._line = (self._line + data).split(b"\n")
        if len(self._line) > LONGEST_LINE:
            whole.append(self._line)
            self._line = b""
        if whole:
            self._log.write(self._worker, [_text(line) for line in whole])
        return count

    def _end(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        if self._line:
            self._log.write(self._worker, [_text(self._line)])
            self._line = b""
        self._log.end(self._worker)


def _print_into(end: Any) -> None:
    """Let this process print into the pipe with this end."""
    descriptor = end.detach()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # None or closed, where the user wants no output
            stream.flush()
    os.write(descriptor, OPENED)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    with suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _text(line: bytes) -> str:
    """A line as a terminal would leave it: a carriage return begins it again."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
