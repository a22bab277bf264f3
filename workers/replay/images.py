"""Images of the transitions of a ring, compressed by zlib, which gives back every byte.

::

    columns of observations    where each image lies: offset, length
                                      |
    images-0.bin  images-1.bin ...    segments: blobs of a sixteenth of the slots, in their order

A segment belongs to transitions whose numbers follow each other, and there is one more than hold
all slots. So when the ring comes round to a segment, all its transitions have been overwritten in
the columns, too: it is begun anew, which gives its bytes back. What holds for the columns, that
``spare`` slots keep the transitions of a checkpoint, holds for their images.

Blobs are written before the columns say where they lie. The next one goes behind those of the
transitions that are booked, which the columns know: what a killed worker has written and not
booked is overwritten, so nothing but the columns has to be saved.

Images that are equal, as the next observation of a transition is the observation of another, are
kept once where one `ImageRing.put` brings them in one segment.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_async.messages.embodied import Ints
from rlinf_async.workers.replay.columns import Column, ReplayError

PARTS: Final = 16
"""segments that all slots take"""
LEVEL: Final = 1
"""of zlib: the quickest one, whose rendered images are hardly larger than those of others"""


def file_of(folder: Path, segment: int) -> Path:
    """The file of a segment."""
    return folder / f"images-{segment}.bin"


class Segments(Protocol):
    """Bytes in a fixed number of segments, by the number of each."""

    def name(self, segment: int) -> str:
        """What it is called in errors."""
        ...

    def size(self, segment: int) -> int:
        """Its bytes. Raises `ReplayError` where it is missing."""
        ...

    def write(self, segment: int, offset: int, blobs: bytes) -> None:
        """Write behind its first ``offset`` bytes; where these are none, it is begun anew."""
        ...

    def read(self, segment: int, places: list[tuple[int, int]]) -> list[bytes]:
        """Return what lies at each (offset, length); less where the segment ends before."""
        ...


class InMemory:
    """Segments in the memory of this process."""

    def __init__(self, count: int) -> None:
        self._kept = [bytearray() for _ in range(count)]
        self._read_from: dict[int, Path] = {}

    def name(self, segment: int) -> str:
        return str(self._read_from.get(segment, f"segment {segment} of the images in memory"))

    def size(self, segment: int) -> int:
        return len(self._kept[segment])

    def write(self, segment: int, offset: int, blobs: bytes) -> None:
        if not offset:
            self._read_from.pop(segment, None)
        self._kept[segment][offset:] = blobs

    def read(self, segment: int, places: list[tuple[int, int]]) -> list[bytes]:
        kept = self._kept[segment]
        return [bytes(kept[offset : offset + length]) for offset, length in places]

    def save(self, folder: Path, segment: int) -> None:
        """Copy a segment into the folder of a checkpoint."""
        file_of(folder, segment).write_bytes(self._kept[segment])

    def load(self, folder: Path, segment: int) -> None:
        """Take a segment from the folder of a checkpoint."""
        file = file_of(folder, segment)
        try:
            self._kept[segment] = bytearray(file.read_bytes())
        except FileNotFoundError:
            raise _missing(file) from None
        self._read_from[segment] = file


class OnDisk:
    """Segments in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self, segment: int) -> str:
        return str(file_of(self._folder, segment))

    def size(self, segment: int) -> int:
        file = file_of(self._folder, segment)
        try:
            return file.stat().st_size
        except FileNotFoundError:
            raise _missing(file) from None

    def write(self, segment: int, offset: int, blobs: bytes) -> None:
        file = file_of(self._folder, segment)
        try:
            with file.open("r+b" if offset else "wb", buffering=0) as opened:
                opened.seek(offset)
                left = memoryview(blobs)
                while left:
                    left = left[opened.write(left) :]
        except OSError as error:
            raise ReplayError(
                f"{file} cannot be written: {error}. Make room, or keep fewer transitions "
                "(replay.capacity)"
            ) from error

    def read(self, segment: int, places: list[tuple[int, int]]) -> list[bytes]:
        file = file_of(self._folder, segment)
        try:
            with file.open("rb", buffering=0) as opened:
                descriptor = opened.fileno()
                return [os.pread(descriptor, length, offset) for offset, length in places]
        except FileNotFoundError:
            raise _missing(file) from None


class ImageRing:
    """The images of a store.

    Args:
        columns: columns of which images are compressed, by name.
        arrays: the store's arrays, which say where these lie.
        slots: of the store.
        folder: folder of the segments' files; None: in memory.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        arrays: Mapping[str, NDArray[Any]],
        slots: int,
        folder: Path | None,
    ) -> None:
        self.columns, self._arrays, self._slots = columns, arrays, slots
        self._rows = -(-slots // PARTS)
        """transitions of a segment"""
        self._count = -(-slots // self._rows) + 1
        self._segments: Segments = InMemory(self._count) if folder is None else OnDisk(folder)
        self._next = (0, 0)
        """number of the transition that is put next, and where its images go, unless others were
        booked"""

    def put(
        self, numbers: range, rows: Mapping[str, NDArray[Any]], oldest: int
    ) -> dict[str, NDArray[Any]]:
        """Write the images of new transitions; return their rows for the arrays.

        ``oldest``: number before which all may have been overwritten.
        """
        kept = {
            name: np.empty(len(numbers), column.kept)
            for name, column in self.columns.items()
            if name in rows
        }
        for name, places in kept.items():
            for field in self._numbers_in(name):
                places[field] = rows[name][field]
        for part, first, last in self._parts(numbers):
            end = 0
            if first % self._rows:
                following, end = self._next
                if following != first:
                    end = self._end(range(max(part * self._rows, oldest), first))
            here = slice(first - numbers.start, last - numbers.start)
            shown = {name: rows[name][here] for name in kept}
            blobs = self._compressed(shown, {name: kept[name][here] for name in kept}, end)
            self._segments.write(part % self._count, end, blobs)
            self._next = (last, end + len(blobs))
        return kept

    def take(self, name: str, numbers: Ints, *, images: bool) -> NDArray[Any]:
        """Return what transitions show, in the dtype of the environment.

        ``images``: whether images are read; else these hold anything.

        Raises `ReplayError` where a file is missing, cut or damaged.
        """
        places = self._arrays[name][numbers % self._slots]
        shown = np.empty(len(numbers), self.columns[name].dtype)
        for field in self._numbers_in(name):
            shown[field] = places[field]
        if not images:
            return shown
        segments = numbers // self._rows % self._count
        for segment in np.unique(segments).tolist():
            which = np.flatnonzero(segments == segment)
            for image in self.columns[name].images:
                lie, pixels = places[image][which], shown[image]
                pairs = list(zip(lie["offset"].tolist(), lie["length"].tolist(), strict=True))
                blobs = self._segments.read(segment, pairs)
                for row, blob in zip(which.tolist(), blobs, strict=True):
                    pixels[row] = self._image(blob, pixels.shape[1:], segment)
        return shown

    def check(self, numbers: range) -> None:
        """Raise `ReplayError` where a segment of transitions is missing or cut."""
        for part, first, last in self._parts(numbers):
            segment, needed = part % self._count, self._end(range(first, last))
            if (size := self._segments.size(segment)) < needed:
                raise ReplayError(
                    f"{self._segments.name(segment)} has {size} bytes, and the images of this run "
                    f"have {needed} there: it was cut. Restore it, or start again in another folder"
                )

    def save(self, folder: Path, numbers: range) -> None:
        """Copy the images of transitions, where they are in memory, into a checkpoint."""
        if isinstance(self._segments, InMemory):
            for part, _, _ in self._parts(numbers):
                self._segments.save(folder, part % self._count)

    def load(self, folder: Path, numbers: range) -> None:
        """Take them from a checkpoint."""
        if isinstance(self._segments, InMemory):
            for part, _, _ in self._parts(numbers):
                self._segments.load(folder, part % self._count)

    def _numbers_in(self, name: str) -> list[str]:
        """The fields of a column that are kept as they are."""
        column = self.columns[name]
        return [one for one in column.dtype.names or () if one not in column.images]

    def _parts(self, numbers: range) -> Iterator[tuple[int, int, int]]:
        """The parts of the ring that numbers, which follow each other, lie in: which one it is,
        counted on through all rounds, and the numbers from ``first`` to before ``last`` in it."""
        first = numbers.start
        while first < numbers.stop:
            part = first // self._rows
            last = min((part + 1) * self._rows, numbers.stop)
            yield part, first, last
            first = last

    def _end(self, numbers: range) -> int:
        """Where the blobs of transitions of one segment end."""
        slots = np.arange(numbers.start, numbers.stop) % self._slots
        end = 0
        for name, column in self.columns.items():
            for image in column.images:
                places = self._arrays[name][image]
                ends = places["offset"][slots] + places["length"][slots]
                end = max(end, int(ends.max(initial=0)))
        return end

    def _compressed(
        self, shown: Mapping[str, NDArray[Any]], kept: Mapping[str, NDArray[Any]], end: int
    ) -> bytes:
        """The blobs of images, which come behind ``end``; ``kept`` is told where each one lies."""
        found: dict[bytes, tuple[int, int]] = {}
        blobs: list[bytes] = []
        for name, rows in shown.items():
            for image in self.columns[name].images:
                places = kept[name][image]
                for row, pixels in enumerate(rows[image]):
                    whole = pixels.tobytes()
                    if whole not in found:
                        blobs.append(zlib.compress(whole, LEVEL))
                        found[whole] = end, len(blobs[-1])
                        end += len(blobs[-1])
                    places[row] = found[whole]
        return b"".join(blobs)

    def _image(self, blob: bytes, shape: tuple[int, ...], segment: int) -> NDArray[np.uint8]:
        size = int(np.prod(shape))
        try:
            return np.frombuffer(zlib.decompress(blob, bufsize=size), np.uint8).reshape(shape)
        except (zlib.error, ValueError) as error:
            raise ReplayError(
                f"{self._segments.name(segment)} is damaged: an image in it cannot be read "
                f"({error}). Restore it, or start again in another folder"
            ) from error


def _missing(file: Path) -> ReplayError:
    return ReplayError(f"{file} is missing: restore it, or start again in another folder")
