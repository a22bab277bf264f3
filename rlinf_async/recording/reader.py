"""`read_recording`: a recording, read while it is written or after.

A recording is read up to its last whole frame. Where bytes in it are damaged, reading goes on at
the next frame that is whole, and `Recording.damaged` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.recording.errors import (
    NoRecording,
    NothingYet,
    NotRecorded,
    RecordingError,
    SegmentGone,
)
from rlinf_async.recording.events import Declared, Dropped, Event, Put
from rlinf_async.recording.segments import Damage, Frame, Header, Segment, segments_of
from rlinf_async.recording.types import check_schema, text_of, type_at

E = TypeVar("E", bound=Event)
FOLDER = "recording"
"""where a run's recordings are, in its folder"""


class RecordedChannel:
    """What a recording says of one channel."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._codec: ItemCodec | None = None

    @property
    def name(self) -> str:
        return self._declared.channel

    @property
    def kind(self) -> str:
        """``"channel"`` or ``"latest"``."""
        return self._declared.kind

    @property
    def type_text(self) -> str:
        """What it carries, for people: ``"Sample"``."""
        return text_of(self._declared.type)

    @property
    def item_type(self) -> Any:
        """What it carries.

        Raises:
            TypeGone: the type cannot be imported any more.
            TypeChanged: it has another schema than it had.
        """
        found = type_at(self._declared.type)
        check_schema(self.name, found, self._declared.schema)
        return found

    def decode(self, body: Encoded) -> Any:
        """An item, of its bytes.

        Raises:
            TypeGone, TypeChanged: see `item_type`.
            RecordingError: it was lost with the process that kept its arrays; or it is not what the
                type says.
        """
        if not body.data:
            raise RecordingError(
                f"channel {self.name!r}: the arrays of this item were lost with its producer"
            )
        if self._codec is None:
            form = Form(tuple(self._declared.members), self._declared.numbered)
            self._codec = ItemCodec(self.item_type, form)
        try:
            return self._codec.decode_copy(body)
        except MalformedFrame as error:
            raise RecordingError(f"channel {self.name!r}: {error}") from error

    def __repr__(self) -> str:
        return f"<RecordedChannel {self.name!r} of {self.type_text}>"


class RecordedItem:
    """An item of a channel."""

    __slots__ = ("_body", "_channel", "_value", "key", "monotonic", "sender", "sequence", "wall",
                 "weight")  # fmt: skip

    def __init__(self, channel: RecordedChannel, put: Put, index: int) -> None:
        self._channel = channel
        self._body: Encoded = put.bodies[index]
        self._value: Any = None
        self.sequence = put.sequence + index
        """its place in the order of the channel, from 1"""
        self.key = put.key
        self.weight = put.weight
        self.sender = put.sender
        """the party that put it"""
        self.wall = put.wall
        """when it came in: seconds since 1970"""
        self.monotonic = put.monotonic
        """the same on the clock of the loop"""

    @property
    def body(self) -> Encoded:
        """The item as it travelled."""
        return self._body

    @property
    def value(self) -> Any:
        """The item; decoded once. Raises: see `RecordedChannel.decode`."""
        if self._value is None:
            self._value = self._channel.decode(self._body)
        return self._value

    @property
    def version(self) -> int | None:
        """Version of the weights that it comes from, of an item that says it."""
        found = getattr(self.value, "version", None)
        return found if isinstance(found, int) else None

    def __repr__(self) -> str:
        return f"<RecordedItem {self.sequence} of {self._channel.name!r}>"


class Recording:
    """What one start of a run has recorded. See `read_recording`.

    It is of the moment in which it was read: of a run that goes on, read it again. What the run
    deletes for its limit while it is read is left out, and counts as missing before.
    """

    def __init__(self, folder: Path, start: int, starts: tuple[int, ...]) -> None:
        self.folder = folder
        """``RUN/recording/<start>``"""
        self.start = start
        self.starts = starts
        """every start of the run that has a recording"""
        self.damaged: list[Damage] = []
        """what cannot be read, and is left out; a frame at the end that is not whole is not in it:
        see ``torn``"""
        self.torn = 0
        """bytes behind the last whole frame: it is being written, or was when the run was killed"""
        self.dropped: Dropped | None = None
        """where the recording ended before the run: the disk could not follow"""
        self._segments = self._read()
        first = next((one.frames[0].first for one in self._segments if one.frames), 1)
        self.missing_before = first - 1
        """events before the first one, whose segments were deleted for the limit; and those deleted
        while they were to be read"""
        self.channels: dict[str, RecordedChannel] = {}
        """what was recorded, by name"""
        self._find_channels()

    @property
    def headers(self) -> Sequence[Header]:
        """What its segments open with."""
        return [one.header for one in self._segments if one.header is not None]

    def _read(self) -> list[Segment]:
        found: list[Segment] = []
        unreadable: list[tuple[Path, RecordingError]] = []
        while not (found or unreadable):
            paths = segments_of(self.folder)
            if not paths:
                raise NothingYet(_nothing_yet(self.folder))
            for path in paths:
                try:
                    found.append(Segment(path, last=path is paths[-1]))
                except SegmentGone:  # just now; where all are, there are others
                    continue
                except RecordingError as error:
                    unreadable.append((path, error))
        if unreadable and not any(one.frames for one in found):
            raise unreadable[0][1]
        for path, why in unreadable:
            with contextlib.suppress(FileNotFoundError):
                self.damaged.append(Damage(path, 0, path.stat().st_size, str(why)))
        for one in found:
            self.damaged += one.damaged
            self.torn += one.torn
        return found

    def _find_channels(self) -> None:
        for header in self.headers:
            for declared in header.channels:
                self.channels.setdefault(declared.channel, RecordedChannel(declared))
        last: Event | None = None
        for one in self._segments:
            for frame in one.frames[:1] if one is not self._segments[-1] else one.frames:
                for event in self._events_of(one, frame):
                    if isinstance(event, Declared):
                        self.channels.setdefault(event.channel, RecordedChannel(event))
                    last = event
        if isinstance(last, Dropped):
            self.dropped = last

    def channel(self, name: str) -> RecordedChannel:
        """A channel of the recording. Raises `NotRecorded`."""
        found = self.channels.get(name)
        if found is None and not self.headers:
            raise NotRecorded(f"channel {name!r}: {_nothing_yet(self.folder)}")
        if found is None:
            known = ", ".join(sorted(self.channels)) or "none"
            raise NotRecorded(f"channel {name!r} is not in {self.folder}: it has {known}")
        return found

    @overload
    def events(
        self, kind: None = None, *, channel: str | None = None, after: int = 0
    ) -> Iterator[Event]: ...

    @overload
    def events(
        self, kind: type[E] | tuple[type[E], ...], *, channel: str | None = None, after: int = 0
    ) -> Iterator[E]: ...

    def events(
        self, kind: type[E] | tuple[type[E], ...] | None = None, *, channel: str | None = None,
        after: int = 0,
    ) -> Iterator[E] | Iterator[Event]:  # fmt: skip
        """The events, in order. Of those that were deleted for the limit, the launches of workers
        and the calls that still ran are there all the same: files repeat them.

        Args:
            kind: only those of this class, or of these.
            channel: only those of the channel of this name.
            after: only those with a higher number.

        Raises:
            NotRecorded: there is no such channel.
        """
        if channel is not None:
            self.channel(channel)
        return self._events(kind or Event, channel, after)

    def _events(
        self, kinds: type[Event] | tuple[type[Event], ...], channel: str | None, after: int
    ) -> Iterator[Any]:
        for event in self._every_event(after):
            if (
                event.number > after
                and isinstance(event, kinds)
                and (channel is None or getattr(event, "channel", None) == channel)
            ):
                yield event

    def _every_event(self, after: int) -> Iterator[Event]:
        last = after
        for segment in self._segments:
            yield from segment.repeated(last)
            for frame in segment.frames:
                if frame.first + frame.events <= after:
                    continue
                for event in self._events_of(segment, frame):
                    last = event.number
                    yield event

    def _events_of(self, segment: Segment, frame: Frame) -> Iterator[Event]:
        """The events of a frame; none where its file is deleted by now."""
        try:
            yield from segment.events(frame)
        except SegmentGone:
            last = segment.frames[-1]
            self.missing_before = max(self.missing_before, last.first + last.events - 1)

    def items(self, channel: str) -> Iterator[RecordedItem]:
        """The items of a channel, in the order in which they came in.

        Raises:
            NotRecorded: there is no such channel.
        """
        of = self.channel(channel)
        for put in self.events(Put, channel=channel):
            for index in range(len(put.bodies)):
                yield RecordedItem(of, put, index)

    def __repr__(self) -> str:
        return f"<Recording {self.folder}: {', '.join(sorted(self.channels))}>"


def read_recording(run: str | os.PathLike[str], start: int | None = None) -> Recording:
    """Read the recording of a run.

    Args:
        run: the run's folder, or a folder with segments.
        start: which start of the run; by default the last one that has a recording.

    Raises:
        NoRecording: there is none.
        NothingYet: it has begun, and nothing of it is written so far.
        OtherVersion, DamagedRecording: no file of it can be read here.
        RecordingError: the files cannot be read.
    """
    folder = Path(run)
    try:
        return _read(folder, start)
    except OSError as error:
        raise RecordingError(f"{folder}: the recording cannot be read: {error}") from error


def _read(folder: Path, start: int | None) -> Recording:
    if not folder.is_dir():
        raise NoRecording(
            f"{folder} is not there" if not folder.exists() else f"{folder} is a file"
        )
    if segments_of(folder):
        number = int(folder.name) if folder.name.isdigit() else 1
        return Recording(folder, number, (number,))
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    starts = tuple(
        sorted(int(one.name) for one in inside.iterdir() if one.name.isdigit() and segments_of(one))
    )
    begun = [one for one in (folder, *inside.iterdir()) if is_start(one)]
    if not starts and begun:
        raise NothingYet(_nothing_yet(begun[-1]))
    if not starts:
        raise NoRecording(
            f"{folder} has no recording: rlinf-async train FILE --record all makes one"
        )
    if start is not None and start not in starts:
        said = ", ".join(map(str, starts))
        raise NoRecording(f"{folder}: start {start} of the run has no recording: {said} have one")
    chosen = starts[-1] if start is None else start
    return Recording(inside / str(chosen), chosen, starts)


def is_start(folder: Path) -> bool:
    """Whether this is the folder of a start of a run, by its name; it may be empty."""
    return folder.name.isdigit() and folder.is_dir()


def _nothing_yet(folder: Path) -> str:
    return (
        f"nothing is written in {folder} yet: the run has just begun, or ended before it had put "
        "anything; read it again in a second"
    )
