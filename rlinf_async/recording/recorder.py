"""`Recorder`: writes down what passes channels, beside the run and never in its way.

::

    the loop     a channel's tap --event--> Recorder.note --> queue, bounded
    the writer   (a thread)                                     --> frames, compressed --> segments

The loop only appends to the queue: it never waits for the disk. Where the disk cannot follow, so
that more than `QUEUE_BYTES` wait when another event comes, or cannot be written to, the *recording*
ends: once logged, counted in `RecorderState`, and said in the file by a last event, `Dropped`. The
run goes on. Events behind an item whose arrays are on their way wait for these; they count.

Frames are closed at `FRAME_BYTES`, or when the first of their events is `FRAME_SECONDS` old (by the
clock of the machine, also where the loop's is virtual). What is written is there when the process
is killed; where the machine loses its power, the system's cache goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import remote_payload_of
from rlinf_async.recording import segments
from rlinf_async.recording.errors import RecordingError
from rlinf_async.recording.events import Declared, Dropped, Event
from rlinf_async.recording.standing import Standing, kept
from rlinf_async.recording.taps import ChannelTap, LatestTap

log = logging.getLogger(__name__)
LIMIT: Final = 2_000_000_000
"""bytes of a run's recordings, where nothing else is said"""
QUEUE_BYTES: Final = 256 * 1024**2
"""bytes that may wait when an event comes: one item of any size is taken"""
QUEUE_EVENTS: Final = 1_000_000
FRAME_BYTES: Final = 1024**2
FRAME_SECONDS: Final = 0.5
ADDED_BYTES: Final = 64 * 1024
"""bytes from which on nothing is added to an event"""
MOST_SEGMENT: Final = 64 * 1024**2
LEAST_SEGMENT: Final = 64 * 1024
SEGMENTS: Final = 8
"""segments that a recording at its limit has, at least: the oldest is deleted whole"""
EVENT_BYTES: Final = 200
"""bytes that an event takes in memory, beside its bodies"""
CLOSING_SECONDS: Final = 10.0
"""seconds that `Recorder.close` waits for the disk"""


class RecorderState(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorder has done so far."""

    channels: list[str]
    """names of those that are recorded"""
    events: int
    """that were noted"""
    written: int
    """number of the last event that is in the file: it and all before it survive a kill"""
    nbytes: int
    """of this start, as they lie on the disk: what was deleted for the limit is not in it"""
    waiting: int
    """bytes that wait for the disk, or for arrays that are on their way"""
    dropped: int
    """events that are missing since the recording ended early"""
    failure: str
    """why it ended early; empty as long as it goes on"""


class Recorder:
    """Writes one recording, of one start of a run. Used by the loop's thread, except `flush`.

    Args:
        folder: ``RUN/recording/<start>``: must be empty, or not there.
        limit: bytes of all recordings of the run; the oldest segments are deleted for it.
        queue_bytes: bytes that may wait for the disk, or for arrays, when an event comes.
        frame_seconds: seconds after which what was noted is written, at most.

    Raises:
        RecordingError: the folder cannot be made, or holds a recording.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int = LIMIT,
        queue_bytes: int = QUEUE_BYTES,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.folder = folder
        self.failure = ""
        """why the recording ended early"""
        self._limit = limit
        self._queue_bytes = queue_bytes
        self._taps: dict[str, ChannelTap | LatestTap] = {}
        self._number = 0
        self._queued: deque[tuple[Event, int]] = deque()
        self._held: deque[tuple[Event, int, list[Any]]] = deque()
        """events from the first one on whose arrays are on their way from their producer"""
        self._held_bytes = 0
        self._open: Event | None = None
        """the event noted last, which is not queued yet"""
        self._open_bytes = 0
        self.last: Event | None = None
        """the same, as long as its tap may add to it"""
        self._noted_bytes = 0
        self._closed = False
        _make(folder)
        self._writer = _Writer(folder, limit, frame_seconds, self._queued)

    # ---- what is recorded

    def record(self, channel: Channel[Any] | Latest[Any]) -> None:
        """Record a channel whose queue lives in this process, from now on. Doing it twice is
        harmless.

        Raises:
            RecordingError: another channel of its name is recorded.
        """
        known = self._taps.get(channel.name)
        inner = channel.queue if isinstance(channel, Channel) else channel
        if known is not None:
            if known.channel is not inner:
                raise RecordingError(f"another channel {channel.name!r} is recorded already")
            return
        tap: ChannelTap | LatestTap
        if isinstance(inner, Queue):
            inner.tapped(tap := ChannelTap(self, inner))
        else:
            inner.tap = tap = LatestTap(self, inner)
        self._taps[channel.name] = tap
        self._writer.declared = [*self._writer.declared, tap.declared()]
        self.note(tap.declared())
        tap.begin()

    @property
    def channels(self) -> list[str]:
        """Names of the channels that are recorded."""
        return list(self._taps)

    # ---- events

    def note(self, event: Event, *bodies: Encoded) -> None:
        """Write an event down, with the items or arguments that belong to it.

        It gets its number and its times here, and belongs to the recorder from then on; so do the
        arrays of its bodies, which nobody may change any more: see `copied`.
        """
        nbytes = EVENT_BYTES
        if bodies:
            event.bodies = list(bodies)
            nbytes += sum([body.nbytes for body in bodies])
        if self._number_it(event):
            self._push(event, nbytes)

    def begin(self, event: Event, nbytes: int = 0) -> None:
        """Note an event that may be added to, with `more`, as long as it is the last one and the
        loop has not come to its next turn."""
        if not self._number_it(event):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody would close it
            self._push(event, EVENT_BYTES + nbytes)
            return
        self._open = event
        self._open_bytes = 0
        self.more(EVENT_BYTES + nbytes)
        loop.call_soon(self._close_open, event)

    def _number_it(self, event: Event) -> bool:
        """Whether it is to be written."""
        if self._open is not None:
            self._push_open()
        if self.failure or self._closed:
            return False
        self._number = event.number = self._number + 1
        event.wall, event.monotonic = time.time(), Queue.now()
        return True

    def more(self, nbytes: int) -> None:
        """Something was added to the last event."""
        self._open_bytes += nbytes
        self.last = self._open if self._open_bytes < ADDED_BYTES else None

    def wait_for(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Keep the last event, and what follows it, until these are done: its arrays come from
        their producer."""
        event, nbytes = self._open, self._open_bytes
        if event is None:
            return
        self._open = self.last = None
        self._push(event, nbytes, tasks)
        for task in tasks:
            task.add_done_callback(self._arrived)

    def _close_open(self, event: Event) -> None:
        if self._open is event:
            self._push_open()

    def _push_open(self) -> None:
        event = self._open
        if event is not None:
            self._open = self.last = None
            self._push(event, self._open_bytes)

    def _push(self, event: Event, nbytes: int, tasks: Sequence[asyncio.Future[Any]] = ()) -> None:
        waiting = self._waiting
        if self.failure or self._writer.failure:
            self._notice()
        elif waiting > self._queue_bytes or len(self._queued) + len(self._held) > QUEUE_EVENTS:
            self._end_early(self._why_full(waiting))
        elif self._held or tasks:
            self._held.append((event, nbytes, list(tasks)))
            self._held_bytes += nbytes
        else:
            self._queue(event, nbytes)

    def _why_full(self, waiting: int) -> str:
        if self._held_bytes * 2 < waiting:
            return f"the disk cannot follow: {waiting / 1e6:.0f} MB wait for it"
        first = self._held[0][0]
        return (
            f"the arrays of an item in channel {getattr(first, 'channel', '')!r} (event "
            f"{first.number}) have not come from their producer, and {waiting / 1e6:.0f} MB wait "
            "with it"
        )

    @property
    def _waiting(self) -> int:
        """Bytes that wait for the disk, or for arrays."""
        return self._held_bytes + self._noted_bytes - self._writer.done_bytes

    def _arrived(self, _: object) -> None:
        while self._held and all(task.done() for task in self._held[0][2]):
            self._release()

    def _release(self) -> None:
        """Queue the first of the events that are held: its arrays are here, or will not come."""
        event, nbytes, tasks = self._held.popleft()
        self._held_bytes -= nbytes
        if tasks:
            event.bodies = [copied(body) for body in event.bodies]
        self._queue(event, nbytes)

    def _queue(self, event: Event, nbytes: int) -> None:
        self._noted_bytes += nbytes
        self._queued.append((event, nbytes))
        self._writer.wake(self._waiting)

    def _end_early(self, why: str) -> None:
        """End the recording; the run goes on as if there were none."""
        self.failure = why
        self._held.clear()
        self._held_bytes = 0
        self._writer.drop(why, self._number)
        for tap in self._taps.values():
            tap.remove()
        log.error(
            "the recording in %s ends here, and the run goes on without: %s", self.folder, why
        )

    # ---- what can be seen of it

    @property
    def state(self) -> RecorderState:
        """What was done so far."""
        self._notice()
        writer = self._writer
        return RecorderState(
            channels=self.channels,
            events=self._number,
            written=writer.written,
            nbytes=writer.nbytes,
            waiting=self._waiting,
            dropped=self._number - writer.written if self.failure else 0,
            failure=self.failure,
        )

    def _notice(self) -> None:
        """End the recording if the writer could not go on."""
        if self._writer.failure and not self.failure:
            self._end_early(self._writer.failure)

    def flush(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all that was noted is in the file, which survives a kill of the process;
        whether it is. Events whose arrays are on their way are not waited for."""
        self._push_open()
        done = not self.failure and self._writer.flush(seconds)
        self._notice()
        return done

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what is left, and end. What the disk does not take in this time is dropped."""
        if self._closed:
            return
        self._push_open()
        while self._held:
            self._release()
        for tap in self._taps.values():
            tap.remove()
        if not (self.flush(seconds) or self.failure):
            self._end_early(f"the disk has not taken all of it within {seconds:.0f} s")
        self._closed = True
        self._writer.close(seconds if not self.failure else 1.0)


def copied(body: Encoded) -> Encoded:
    """An item with arrays of its own: those of its sender may be used again. Without a byte where
    its arrays are not here, and will not come."""
    if not body.buffers:
        return body
    if remote_payload_of(body) is not None:
        return Encoded(b"")
    return Encoded(body.data, [bytearray(one) for one in body.buffers])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RecordingError(f"{folder} is not empty: a recording needs a folder of its own")
    except OSError as error:
        raise RecordingError(f"{folder} cannot be made: {error}") from error


def project_version() -> str:
    """The version of the project that is running."""
    try:
        return version("rlinf-async")
    except PackageNotFoundError:  # a checkout that was not installed
        return "0"


class _Writer:
    """The thread that writes, and its files."""

    def __init__(
        self, folder: Path, limit: int, frame_seconds: float, queued: deque[tuple[Event, int]]
    ) -> None:
        self.folder = folder
        self.declared: list[Declared] = []
        """what the next segment says of the channels"""
        self.done_bytes = 0
        """bytes of events that were written or given up, as they were counted when noted"""
        self.written = 0
        self.nbytes = 0
        self.failure = ""
        self._frame_seconds = frame_seconds
        self._limit = limit
        self._segment_bytes = max(LEAST_SEGMENT, min(MOST_SEGMENT, limit // SEGMENTS))
        self._frame_bytes = min(FRAME_BYTES, self._segment_bytes)
        self._queued = queued
        self._standing = Standing()
        self._wake = threading.Event()
        self._filled = threading.Event()
        self._flushed = threading.Event()
        self._flushing = self._ending = False
        self._dropped: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._file = -1
        self._file_bytes = 0
        self._segment = 0
        self._others = _earlier(folder)
        """segments that are complete, oldest first, with their bytes"""

    # ---- for the loop

    def wake(self, waiting: int) -> None:
        """Events are queued, and this many bytes wait."""
        if self._thread is None:
            self._start()
        if not self._wake.is_set():
            self._wake.set()
        if waiting >= FRAME_BYTES and not self._filled.is_set():
            self._filled.set()

    def drop(self, why: str, noted: int) -> None:
        """Write no more than this: that the recording ends. ``noted``: number of the last event."""
        self._dropped = why, noted
        if self._thread is None:  # nothing was written before
            self._start()
        self._wake.set()
        self._filled.set()

    def flush(self, seconds: float) -> bool:
        if self._thread is None:  # nothing was noted
            return True
        self._flushed.clear()
        self._flushing = True
        self._wake.set()
        self._filled.set()
        return self._flushed.wait(seconds) and not self.failure

    def close(self, seconds: float) -> bool:
        """Whether everything was written in this time."""
        thread = self._thread
        if thread is None:
            return True
        self._ending = True
        self._wake.set()
        self._filled.set()
        thread.join(seconds)
        return not thread.is_alive()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if not (self._flushing or self._ending or self._dropped):
                self._filled.wait(self._frame_seconds)
            self._wake.clear()
            self._filled.clear()
            flushing, ending, dropped = self._flushing, self._ending, self._dropped
            self._flushing = False
            self._empty()
            if dropped is not None:
                self._say_dropped(*dropped)
            if flushing:
                self._flushed.set()
            if ending or dropped is not None:
                break
        self._flushed.set()
        self._close_file()

    def _empty(self) -> None:
        """Write what is queued, in frames."""
        while self._queued:
            if self._dropped is not None:
                self._forget()
                return
            events: list[Event] = []
            nbytes = 0
            while nbytes < self._frame_bytes:
                try:
                    event, size = self._queued.popleft()
                except IndexError:
                    break
                events.append(event)
                nbytes += size
            self._write(events)
            self.done_bytes += nbytes

    def _forget(self) -> None:
        while self._queued:
            self.done_bytes += self._queued.popleft()[1]

    def _write(self, events: list[Event]) -> None:
        if self.failure:
            return
        first, last = events[0].number, events[-1].number
        of_workers = kept(events)
        try:
            self._append(segments.frame_of(events), first)
        except OSError as error:
            self.failure = f"{error.strerror or error} ({self.folder})"
        except Exception as error:  # an event that cannot be written must not end the thread
            log.exception("an event of the recording in %s could not be written", self.folder)
            self.failure = f"{type(error).__name__}: {error}"
        else:
            self.written = last
            self._standing.follow(of_workers)

    def _append(self, parts: list[bytes], first: int) -> None:
        size = sum(map(len, parts))
        if size > self._limit:
            raise OSError(f"an item of {size} bytes is larger than the limit of a recording")
        if self._file < 0 or self._file_bytes + size > self._segment_bytes:
            self._next_segment(first, size)
        self._put(parts)

    def _put(self, parts: list[bytes]) -> None:
        """Append a frame, or leave the file as it was."""
        try:
            written = segments.write_all(self._file, parts)
        except OSError:
            with contextlib.suppress(OSError):  # what is left of it is torn, which readers know
                os.ftruncate(self._file, self._file_bytes)
            raise
        self._file_bytes += written
        self.nbytes += written

    def _next_segment(self, first: int, size: int) -> None:
        """Open another file, whose first event has this number, for a frame of this size."""
        if self._file >= 0:
            self._others.append((self._path, self._file_bytes))
            self._close_file()
        self._segment += 1
        header = segments.Header(
            project=project_version(),
            run=self.folder.parent.parent.name,
            start=int(self.folder.name) if self.folder.name.isdigit() else 0,
            segment=self._segment,
            wall=time.time(),
            monotonic=time.monotonic(),
            first=first,
            channels=self.declared,
            standing=self._standing.frame(self._segment_bytes // 4),
        )
        opening = segments.opening(header)
        self._make_room(max(self._segment_bytes, size + sum(map(len, opening))))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        self._file_bytes = 0
        self._put(opening)

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._segment:06d}{segments.SUFFIX}"

    def _make_room(self, wanted: int) -> None:
        """Delete the oldest segments, so that another one fits into the limit."""
        total = sum(size for _, size in self._others) + wanted
        while self._others and total > self._limit:
            path, size = self._others.pop(0)
            total -= size
            if path.parent == self.folder:
                self.nbytes -= size
            path.unlink(missing_ok=True)
            if path.parent != self.folder:
                with contextlib.suppress(OSError):  # others are left in it
                    path.parent.rmdir()

    def _say_dropped(self, why: str, noted: int) -> None:
        """Say in the file that it ends here, if the disk takes that much."""
        first = self.written + 1
        dropped = Dropped(
            number=first,
            wall=time.time(),
            monotonic=time.monotonic(),
            first=first,
            events=noted - self.written,
            reason=why,
        )
        with contextlib.suppress(OSError):
            self._append(segments.frame_of([dropped]), first)

    def _close_file(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1


def _earlier(folder: Path) -> list[tuple[Path, int]]:
    """The segments of earlier starts of the run, oldest first, with their bytes."""
    found: list[tuple[Path, int]] = []
    with contextlib.suppress(OSError):
        starts = [one for one in folder.parent.iterdir() if one.name.isdigit() and one != folder]
        for start in sorted(starts, key=lambda one: int(one.name)):
            found += [(one, one.stat().st_size) for one in segments.segments_of(start)]
    return found
