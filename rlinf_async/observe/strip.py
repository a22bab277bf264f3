"""Pictures of an episode side by side, as a PNG: for a page, a paper or a pull request."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

import numpy as np
from PIL import Image

from rlinf_async.observe.frames import Frame, Frames

HEIGHT: Final = 160
"""pixels of a picture; frames that are higher are made smaller"""
COLOURS: Final = 128
"""of the whole strip: a rendered scene needs no more, and the file is a third as large"""
GAP: Final = 4
"""white pixels between two pictures"""


class Strip(Frames):
    """Takes the frames of an episode one by one, and writes ``pictures`` of them, evenly spaced,
    with the first and the last.

    Leaving the block writes the file. However long the episode is, at most four times as many
    frames as pictures are kept.
    """

    one_size = "pictures of an episode have one size"

    def __init__(self, path: Path, *, pictures: int = 6) -> None:
        super().__init__(path)
        self._pictures = pictures
        self._kept: list[Frame] = []
        self._stride = 1
        """of how many frames one is kept"""
        self._last: Frame | None = None

    def _take(self, frame: Frame) -> None:
        self._last = frame.copy()
        if (self.frames - 1) % self._stride == 0:
            self._kept.append(self._last)
        if len(self._kept) > 4 * self._pictures:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._last is not None:
            self._write(self._last)

    def _write(self, last: Frame) -> None:
        frames = self._kept if self._kept[-1] is last else [*self._kept, last]
        chosen = np.linspace(0, len(frames) - 1, min(self._pictures, len(frames))).round()
        pictures = [_smaller(frames[int(place)]) for place in chosen]
        width, height = pictures[0].size
        strip = Image.new("RGB", (len(pictures) * (width + GAP) - GAP, height), "white")
        for place, picture in enumerate(pictures):
            strip.paste(picture, (place * (width + GAP), 0))
        strip.quantize(COLOURS, dither=Image.Dither.NONE).save(
            self.path, format="PNG", optimize=True
        )


def _smaller(frame: Frame) -> Image.Image:
    image = Image.fromarray(frame)
    if image.height <= HEIGHT:
        return image
    return image.resize((max(1, image.width * HEIGHT // image.height), HEIGHT))
