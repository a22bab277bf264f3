"""What takes the frames of an episode: a video, or a strip of pictures."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rlinf_async.observe.errors import VideoError

Frame = NDArray[np.uint8]


class Frames(abc.ABC):
    """Checks and counts frames; a subclass makes a file of them."""

    one_size: ClassVar[str]
    """in messages: that it has one size"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = 0
        self.blank_frames = 0
        """Frames of a single colour."""
        self._shape: tuple[int, ...] = ()

    def add(self, frame: Frame) -> None:
        """Append a frame ``[height, width, rgb]``, of the size of the first.

        Raises:
            VideoError: the size is another, or the frame cannot be taken.
        """
        self._shape = self._shape or frame.shape
        if frame.shape != self._shape:
            raise VideoError(
                f"frame {self.frames} is {frame.shape}, the first one was {self._shape}: "
                f"{self.one_size}"
            )
        self.frames += 1
        self.blank_frames += not frame.std() > 0
        self._take(frame)

    @abc.abstractmethod
    def _take(self, frame: Frame) -> None:
        """Take the newest frame. Its array may be drawn into again afterwards."""
