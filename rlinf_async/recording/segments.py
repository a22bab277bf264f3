"""The files of a recording: segments of frames.

::

    RUN/recording/2/000001.rec    start 2 of the run, its first segment

    segment   signature (8 bytes) | u32 version of the format | header frame | frames
              the header has what was noted before, and is needed behind: channels, launches, calls
    frame     magic | u32 CRC | u64 stored bytes | u64 bytes | u64 first number | u32 events | data
    data      zstandard of: i64 wall | i64 monotonic (microseconds) | u64 bytes of the events |
              events (one MessagePack array) | their bodies, arrays of each behind it

Numbers are little-endian. The CRC is that of everything behind it. In a frame, events have their
times and numbers as distances from the one before, the first from those of the frame.

A frame is made in few calls of C: while Python computes in the writer's thread, the loop's waits.

Invariant: a segment is only ever appended to, by whole frames. Whatever it ends with after a crash,
the frames before are whole; and where bytes in its middle are damaged, the next frame is found by
its magic.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import zstandard

from rlinf_async.channels.encoded import Encoded
from rlinf_async.recording.errors import (
    DamagedRecording,
    OtherVersion,
    RecordingError,
    SegmentGone,
)
from rlinf_async.recording.events import AnyEvent, Declared, Event

FORMAT: Final = 2
"""version of the format"""
SIGNATURE: Final = b"\x93RLINFA\n"
MAGIC: Final = b"\xa7\x1fRF"
SUFFIX: Final = ".rec"
LEVEL: Final = 3
"""of the compression"""
JOINED: Final = 64 * 1024
"""bytes below which parts are joined before they are compressed: a call for each costs more"""
MOST_PIECES: Final = 512
"""parts that one write is given"""
_OPENING: Final = struct.Struct("<8sI")
_FRAME: Final = struct.Struct("<4sIQQQI")
_CHECKED: Final = struct.Struct("<QQQI")
_BEGINNING: Final = struct.Struct("<qqQ")
_LENGTH: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"\d{6}\.rec")

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[AnyEvent]).decode


class Header(msgspec.Struct, kw_only=True):
    """What a segment opens with."""

    project: str
    """version of rlinf_async that wrote it"""
    run: str
    """name of the run"""
    start: int
    segment: int
    wall: float
    """when it was opened: seconds since 1970"""
    monotonic: float
    first: int
    """number of its first event"""
    channels: list[Declared] = []
    """every channel that was recorded by then"""
    standing: bytes = b""
    """a frame: the launches and calls before it that are of use still, in their order"""


class Frame(NamedTuple):
    """A whole frame in a segment."""

    offset: int
    stored: int
    """bytes of its data, compressed"""
    size: int
    """bytes of its data"""
    first: int
    """number of its first event"""
    events: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + _FRAME.size + self.stored


class Damage(NamedTuple):
    """A part of a file that cannot be read, and was left out."""

    path: Path
    offset: int
    nbytes: int
    why: str


# ---- writing


def opening(header: Header) -> list[bytes]:
    """The first bytes of a segment."""
    return [
        _OPENING.pack(SIGNATURE, FORMAT),
        *_framed([msgspec.msgpack.encode(header)], header.first, 0),
    ]


def frame_of(events: Sequence[Event]) -> list[bytes]:
    """Events as a frame. They are changed: the caller does not keep them."""
    begun = wall, monotonic = round(events[0].wall * 1e6), round(events[0].monotonic * 1e6)
    first = number = events[0].number
    parts: list[Any] = []
    for event in events:
        now, then = round(event.wall * 1e6), round(event.monotonic * 1e6)
        event.wall, event.monotonic = now - wall, then - monotonic
        wall, monotonic = now, then
        event.number, number = event.number - number, event.number
        if event.bodies:
            parts += _bodies(event)
    said = _encode(events)
    return _framed([_BEGINNING.pack(*begun, len(said)), said, *parts], first, len(events))


def _bodies(event: Event) -> list[Any]:
    """The parts of an event's bodies, whose sizes are noted in its place."""
    bodies: Sequence[Encoded] = event.bodies
    event.bodies = None
    parts: list[Any] = [body.data for body in bodies]
    event.sizes = list(map(len, parts))
    apart = [body.buffers for body in bodies]
    if any(apart):
        event.arrays = [list(map(len, buffers)) for buffers in apart]
        parts = [part for body in bodies for part in (body.data, *body.buffers)]
    return parts


def _framed(parts: Sequence[Any], first: int, events: int) -> list[bytes]:
    sizes = list(map(len, parts))
    size = sum(sizes)
    compressing = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=size)
    stored: list[bytes] = []
    begin = 0
    for large in [at for at, nbytes in enumerate(sizes) if nbytes >= JOINED]:
        stored.append(compressing.compress(b"".join(parts[begin:large])))
        stored.append(compressing.compress(parts[large]))
        begin = large + 1
    stored += (compressing.compress(b"".join(parts[begin:])), compressing.flush())
    checked = _CHECKED.pack(sum(map(len, stored)), size, first, events)
    crc = zlib.crc32(checked)
    for one in stored:
        crc = zlib.crc32(one, crc)
    return [MAGIC, _LENGTH.pack(crc), checked, *filter(None, stored)]


def write_all(file: int, parts: Sequence[bytes]) -> int:
    """Write all of these; the number of bytes. Raises `OSError`."""
    waiting: list[bytes | memoryview] = list(parts)
    total = 0
    while waiting:
        written = os.writev(file, waiting[:MOST_PIECES])
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        total += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = memoryview(waiting[0])[written:]
    return total


# ---- reading


def segments_of(folder: Path) -> list[Path]:
    """The segments of one start of a run, in order; none where the folder is gone."""
    try:
        return sorted(one for one in folder.iterdir() if _NAME.fullmatch(one.name))
    except FileNotFoundError:
        return []


class Segment:
    """A file of a recording, as far as it can be read now.

    Args:
        path: of the file; it may be written to meanwhile.
        last: whether no segment follows, so that a frame at its end may not be whole yet.

    Raises:
        OtherVersion, DamagedRecording: it is no segment that can be read here.
        SegmentGone: it was deleted.
        RecordingError: it cannot be opened.
    """

    def __init__(self, path: Path, *, last: bool) -> None:
        self.path = path
        self.frames: list[Frame] = []
        self.damaged: list[Damage] = []
        self.header: Header | None = None
        self.torn = 0
        """bytes behind the last whole frame: of a frame that is being written, or was when the
        run ended"""
        with self._mapped() as data:
            self.size = len(data)
            if self._check_opening(data):
                self._scan(data, last)
            else:
                self.torn = len(data)

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def _mapped(self) -> mmap.mmap | _Nothing:
        try:
            with self.path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return _Nothing()
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise SegmentGone(
                f"{self.path} was deleted for the limit of the recording while it was read: read "
                "it again"
            ) from error
        except (OSError, ValueError) as error:
            raise RecordingError(f"{self.path} cannot be read: {error}") from error

    def _check_opening(self, data: mmap.mmap | _Nothing) -> bool:
        """Whether there is an opening; False where the run ended before it was written."""
        opening = bytes(data[: _OPENING.size])
        if len(opening) < _OPENING.size:
            if not SIGNATURE.startswith(opening[: len(SIGNATURE)]):
                raise DamagedRecording(f"{self.path} is no file of a recording")
            return False
        signature, version = _OPENING.unpack(opening)
        if signature != SIGNATURE:
            raise DamagedRecording(
                f"{self.path} is no file of a recording: it begins with {signature!r}"
            )
        if version != FORMAT:
            raise OtherVersion(
                f"{self.path} has version {version} of the format, and this rlinf_async reads "
                f"version {FORMAT}: read it with the version that wrote it"
            )
        return True

    def _scan(self, data: mmap.mmap | _Nothing, last: bool) -> None:
        """Find the whole frames."""
        at, bad = _OPENING.size, -1
        while at < len(data):
            found = frame_at(data, at)
            if found is not None:
                if bad >= 0:
                    self._leave_out(bad, at, "bytes are not as they were written")
                    bad = -1
                if self.header is None and not found.events:
                    self.header = _header(data, found)
                else:
                    self.frames.append(found)
                at = found.end
                continue
            bad = at if bad < 0 else bad
            at = data.find(MAGIC, at + 1)
            if at < 0:
                break
        if bad < 0:
            return
        if last and not _is_whole(data, bad):
            self.torn = len(data) - bad
        else:
            self._leave_out(bad, len(data), "bytes are not as they were written, or missing")

    def _leave_out(self, start: int, stop: int, why: str) -> None:
        self.damaged.append(Damage(self.path, start, stop - start, why))

    def repeated(self, after: int) -> Iterator[Event]:
        """Launches and calls of files before this one, which its header repeats: those with a
        higher number than the last event that was read."""
        data = b"" if self.header is None else self.header.standing
        frame = frame_at(data, 0)
        if frame is not None:
            for event in events_of(data[_FRAME.size : frame.end], frame, self.path):
                if event.number > after:
                    yield event

    def events(self, frame: Frame) -> Iterator[Event]:
        """The events of a frame of this segment.

        Raises:
            SegmentGone: it was deleted meanwhile.
            RecordingError: it cannot be read.
        """
        with self._mapped() as data:
            stored = bytes(data[frame.offset + _FRAME.size : frame.end])
        yield from events_of(stored, frame, self.path)


class _Nothing(bytes):
    """A file without a byte, which cannot be mapped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def frame_at(data: Any, at: int) -> Frame | None:
    """The frame that begins there, if it is whole."""
    head = bytes(data[at : at + _FRAME.size])
    if len(head) < _FRAME.size or not head.startswith(MAGIC):
        return None
    _, crc, stored, size, first, events = _FRAME.unpack(head)
    end = at + _FRAME.size + stored
    if end > len(data):
        return None
    with memoryview(data) as view, view[at + 8 : end] as checked:
        return Frame(at, stored, size, first, events) if zlib.crc32(checked) == crc else None


def _is_whole(data: Any, at: int) -> bool:
    """Whether a frame that is damaged has all its bytes: it is not one that is being written."""
    head = bytes(data[at : at + _FRAME.size])
    if len(head) < _FRAME.size or not head.startswith(MAGIC):
        return len(head) == _FRAME.size
    return at + _FRAME.size + int(_FRAME.unpack(head)[2]) <= len(data)


def _header(data: Any, frame: Frame) -> Header | None:
    raw = _raw(bytes(data[frame.offset + _FRAME.size : frame.end]), frame)
    try:
        return msgspec.msgpack.decode(raw, type=Header)
    except msgspec.DecodeError:
        return None


def _raw(stored: bytes, frame: Frame) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=frame.size)
    except zstandard.ZstdError as error:
        raise RecordingError(
            f"a frame at byte {frame.offset} is not compressed: {error}"
        ) from error


def events_of(stored: bytes, frame: Frame, path: Path) -> Iterator[Event]:
    """The events of the data of a frame."""
    raw = memoryview(_raw(stored, frame))
    number = frame.first
    try:
        wall, monotonic, length = _BEGINNING.unpack_from(raw)
        at = _BEGINNING.size + length
        for event in _decode(raw[_BEGINNING.size : at]):
            wall += int(event.wall)
            monotonic += int(event.monotonic)
            number += event.number
            event.number, event.wall, event.monotonic = number, wall / 1e6, monotonic / 1e6
            bodies: list[Encoded] = []
            for index, size in enumerate(event.sizes):
                body = bytes(raw[at : at + size])
                at += size
                buffers: list[memoryview | bytearray] = []
                for nbytes in event.arrays[index] if event.arrays else ():
                    buffers.append(bytearray(raw[at : at + nbytes]))
                    at += nbytes
                bodies.append(Encoded(body, buffers))
            event.bodies = bodies
            yield event
    except (struct.error, msgspec.DecodeError, IndexError) as error:
        raise RecordingError(
            f"{path}: the frame at byte {frame.offset} has events that cannot be read: {error}"
        ) from error
