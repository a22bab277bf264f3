"""A recording, as a replay reads it: of a run's folder, or of a bundle.

A bundle is a folder like that of a run, with the part of the recording that one worker needs, and a
file `MANIFEST` that says which. See `rlinf_async.replaying.bundle`.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from rlinf_async.channels.encoded import Encoded, Form
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.config import UsageError
from rlinf_async.config.registry import FOLDER as COMMAND_FOLDER
from rlinf_async.recording.errors import RecordingError
from rlinf_async.recording.events import Declared, Dropped, Event, Launched, TypePath
from rlinf_async.recording.segments import Segment, segments_of
from rlinf_async.recording.types import check_schema, type_at
from rlinf_async.recording.values import NotFound, found_at
from rlinf_async.replaying.ends import ChannelInfo
from rlinf_async.replaying.history import Decode

FOLDER: Final = "recording"
"""folder of the recordings in that of a run"""
MANIFEST: Final = "bundle.json"
CODE: Final = "code"
"""folder of a bundle with files of code"""
_ONLY: Final = re.compile(r"(?P<role>[^\[\]:]+)(?:\[(?P<rank>\d+)\]|:(?P<number>\d+))?")


class Manifest(msgspec.Struct, kw_only=True):
    """What a bundle is of."""

    worker: str
    start: int
    first: int
    """number of the first event; 1: the recording is there from its beginning"""
    around: str = ""
    error: str = ""
    """what ended the run, or the worker"""
    versions: dict[str, str] = {}
    missing: list[str] = []
    """code that the worker needs and that is not in the bundle"""


class Source:
    """A recording. Made by `open_source`.

    Args:
        folder: the run's, or that of a bundle.
        starts: the folders of its recordings, by the number of the start.
    """

    def __init__(self, folder: Path, starts: dict[int, Path]) -> None:
        self.folder = folder
        self.starts = starts
        self.manifest = _manifest(folder)
        code = folder / CODE
        self.code = code if code.is_dir() else None
        self.damaged: list[str] = []
        """parts of files that could not be read"""
        self._segments: dict[int, list[Segment]] = {}
        self._declared: dict[int, dict[str, Declared]] = {}
        self._channels: dict[tuple[int, str], ChannelInfo] = {}
        self._codecs: dict[tuple[int, str], ItemCodec] = {}
        self._scripts: dict[int, str] = {}

    def segments(self, start: int) -> list[Segment]:
        """The files of one start, in order.

        Raises:
            UsageError: they cannot be read.
        """
        found = self._segments.get(start)
        if found is None:
            paths = segments_of(self.starts[start])
            with_last = [(path, path == paths[-1]) for path in paths]
            try:
                found = [Segment(path, last=last) for path, last in with_last]
            except RecordingError as error:
                raise UsageError(str(error)) from error
            self._segments[start] = found
            for segment in found:
                self.damaged += [
                    f"{one.path.name}: {one.nbytes} bytes at {one.offset}: {one.why}"
                    for one in segment.damaged
                ]
        return found

    def events(self, start: int) -> Iterator[Event]:
        """The events of one start, in order; before the first of a recording that was cut, the
        launches and calls that its file repeats."""
        last = 0
        for segment in self.segments(start):
            yield from segment.repeated(last)
            for frame in segment.frames:
                last = frame.first + frame.events - 1
                try:
                    yield from segment.events(frame)
                except RecordingError as error:
                    raise UsageError(f"{segment.path}: {error}") from error

    def cut_before(self, start: int) -> int:
        """Number of the first event of one start: 1, unless earlier ones were deleted."""
        if self.manifest is not None:
            return self.manifest.first
        for segment in self.segments(start):
            for frame in segment.frames:
                return frame.first
        return 1

    def ended_early(self, start: int) -> str:
        """Why the recording of one start ended before the run; empty if it did not."""
        written = [segment for segment in self.segments(start) if segment.frames]
        if not written:
            return ""
        *_, last = written[-1].events(written[-1].frames[-1])
        if not isinstance(last, Dropped):
            return ""
        return (
            f"the recording ended before the run: {last.events} events are missing: {last.reason}"
        )

    def check_whole(self, start: int) -> None:
        """Raise `UsageError` where events are missing between the first and the last."""
        next_number = self.cut_before(start)
        for segment in self.segments(start):
            for frame in segment.frames:
                if frame.first != next_number and self.manifest is None:
                    raise UsageError(
                        f"{segment.path}: events {next_number} to {frame.first - 1} are missing"
                        f"{': ' + '; '.join(self.damaged) if self.damaged else ''}; what a worker "
                        "was given is not known without them"
                    )
                next_number = frame.first + frame.events

    # ---- channels

    def declared(self, start: int) -> dict[str, Declared]:
        """The channels of one start, by name."""
        found = self._declared.get(start)
        if found is None:
            found = {}
            for segment in self.segments(start):
                for one in segment.header.channels if segment.header is not None else ():
                    found.setdefault(one.channel, one)
            for event in self.events(start):
                if isinstance(event, Declared):
                    found.setdefault(event.channel, event)
                if isinstance(event, Launched) and event.cls.partition(":")[0].endswith(".py"):
                    self._scripts[start] = event.cls.rpartition(":")[0]
            self._declared[start] = found
        return found

    def channel(self, start: int, name: str) -> ChannelInfo | None:
        """A channel that was recorded; None: it was not.

        Raises:
            UsageError: its type is not here, or has changed.
        """
        known = self._channels.get((start, name))
        declared = self.declared(start).get(name)
        if known is not None or declared is None:
            return known
        item_type = self._type(start, declared)
        found = self._channels[start, name] = ChannelInfo(name, item_type)
        form = Form(declared.members, numbered=declared.numbered)
        self._codecs[start, name] = ItemCodec(item_type, form)
        return found

    def _type(self, start: int, declared: Declared) -> Any:
        try:
            item_type = self._type_at(declared.type, self._scripts.get(start, ""))
            check_schema(declared.channel, item_type, declared.schema)
        except (RecordingError, NotFound) as error:
            raise UsageError(f"channel {declared.channel!r}: {error}") from error
        return item_type

    def _type_at(self, path: TypePath, script: str) -> Any:
        """The type at a path; one of a script is found in its file."""
        if isinstance(path, str) and script and path.startswith(("__main__:", "__mp_main__:")):
            return found_at(f"{script}:{path.partition(':')[2]}", self.code)
        return type_at(path)

    def decoder(self, start: int) -> Decode:
        """Decodes the items of the channels of one start."""

        def decode(channel: str, encoded: Encoded) -> Any:
            if not encoded.data:
                raise UsageError(
                    f"channel {channel!r}: an item could not be recorded, its arrays were gone "
                    "with the process that had them"
                )
            self.channel(start, channel)
            try:
                return self._codecs[start, channel].decode(encoded)
            except MalformedFrame as error:
                raise UsageError(f"channel {channel!r}: an item is damaged: {error}") from error

        return decode

    # ---- workers

    def worker(self, only: str, start: int | None) -> tuple[int, str]:
        """The start and the name of the worker that is meant.

        Args:
            only: role or group, and rank: ``"actor"``, ``"Actor:1"``, ``"Actor[1]"``.
            start: number of the start; None: the last one in which it was launched.

        Raises:
            UsageError: there is none.
        """
        asked = _ONLY.fullmatch(only.strip())
        if asked is None:
            raise UsageError(f"--only {only!r}: name a role and a rank, such as actor or rollout:1")
        if start is not None and start not in self.starts:
            known = ", ".join(map(str, sorted(self.starts)))
            raise UsageError(f"start {start} was not recorded in {self.folder}: there is {known}")
        seen: dict[str, Launched] = {}
        for number in [start] if start is not None else sorted(self.starts, reverse=True):
            launched = self.launched(number)
            group = _group(asked["role"], launched)
            ranks = sorted(one.rank for one in launched.values() if one.group == group)
            rank = asked["rank"] or asked["number"]
            if group and (rank is None or int(rank) in ranks):
                return number, f"{group}[{rank or ranks[0]}]"
            seen |= launched
        raise UsageError(_not_there(only, self.folder, seen))

    def launched(self, start: int) -> dict[str, Launched]:
        """The first launch of every worker of one start, by its name."""
        found: dict[str, Launched] = {}
        for event in self.events(start):
            if isinstance(event, Launched):
                found.setdefault(event.worker, event)
        return found


def _group(role: str, launched: dict[str, Launched]) -> str:
    """The group that a role means: by its name, whatever its case, or by its class."""
    groups = {one.group: one.cls.rpartition(":")[2].rpartition(".")[2] for one in launched.values()}
    wanted = role.strip().lower()
    for group, cls in groups.items():
        if wanted in (group.lower(), cls.lower()):
            return group
    inside = [group for group, cls in groups.items() if wanted in (f"{cls}".lower(), group.lower())]
    return inside[0] if len(inside) == 1 else ""


def _not_there(only: str, folder: Path, seen: dict[str, Launched]) -> str:
    if not seen:
        return (
            f"{folder}: no launch of a worker is in the recording: it was made without those, or "
            "its beginning was deleted for its limit"
        )
    names = ", ".join(sorted(seen))
    return f"--only {only}: no such worker was recorded in {folder}; there are {names}"


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """The recording of a run's folder, or of a bundle, which may be packed.

    Raises:
        UsageError: there is none.
    """
    if not path.is_file():
        with _importing_from(path / CODE):
            yield open_source(path)
        return
    with tempfile.TemporaryDirectory(prefix="rlinf-bundle-") as name:
        folder = _unpacked(path, Path(name))
        with _importing_from(folder / CODE):
            yield open_source(folder)


def _unpacked(path: Path, into: Path) -> Path:
    try:
        with (
            path.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            tar.extractall(into, filter="data")
    except (OSError, tarfile.TarError, zstandard.ZstdError) as error:
        raise UsageError(f"{path} is no bundle: {error}") from error
    found = [one for one in into.iterdir() if (one / MANIFEST).is_file()]
    if not found:
        raise UsageError(f"{path} is no bundle: it has no {MANIFEST}")
    return found[0]


@contextmanager
def _importing_from(code: Path) -> Iterator[None]:
    """Find modules, and files that are named from the folder of a command, in that of a bundle."""
    if not code.is_dir():
        yield
        return
    before = os.environ.get(COMMAND_FOLDER)
    sys.path.insert(0, str(code))
    os.environ[COMMAND_FOLDER] = str(code.resolve())
    try:
        yield
    finally:
        sys.path.remove(str(code))
        if before is None:
            del os.environ[COMMAND_FOLDER]
        else:
            os.environ[COMMAND_FOLDER] = before


def open_source(path: Path) -> Source:
    """The recording in a folder: of a run, or of a bundle.

    Raises:
        UsageError: there is none.
    """
    folder = path / FOLDER
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder or file")
    starts: dict[int, Path] = {}
    begun: Path | None = None
    if folder.is_dir():
        for one in folder.iterdir():
            if one.name.isdigit() and one.is_dir():
                begun = one
                if segments_of(one):
                    starts[int(one.name)] = one
    if not starts and begun is not None:
        raise UsageError(
            f"nothing is written in {begun} yet: the run has just begun, or ended before its "
            "workers did anything"
        )
    if not starts:
        raise UsageError(
            f"{path} has no recording: record the next run of it, rlinf-async train FILE.toml "
            "--record all"
        )
    return Source(path, starts)


def _manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
